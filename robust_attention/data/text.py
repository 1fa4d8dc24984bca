"""Text as numbers: files of words, one line a paragraph, and the vocabulary that numbers the words.

Files are as WikiText's: UTF-8, words apart by spaces, one line a paragraph, `<unk>` for rare words; `.xz` ones are
unpacked as they are read. Every line ends with the word `<eos>`, which is not in the file.
"""

import hashlib
import json
import lzma
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from robust_attention import _checks
from robust_attention._files import write_bytes, write_json

EOS, UNK = "<eos>", "<unk>"
_FORMAT = "robust-attention vocabulary 1"


class Coder(Protocol):
    """What numbers text: a `Vocabulary` of whole words, or `Subwords`."""

    @property
    def words(self) -> Sequence[str]:
        """By number; pieces of words as they are written."""

    @property
    def eos(self) -> int:
        """Ends every line."""

    @property
    def unk(self) -> int | None:
        """Stands for every word that has no number of its own."""

    @property
    def checksum(self) -> str:
        """Equal for coders that number text alike."""

    def encode(self, line: str) -> list[int]:
        """The numbers of a line, without its end."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """A text with these numbers."""
        ...

    def save(self, path: Path) -> None:
        """Write what `load_coder` reads."""
        ...


class Vocabulary:
    """Words and their numbers, the most frequent word first."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._index = {word: number for number, word in enumerate(self.words)}
        if len(self._index) < len(self.words):
            twice = next(word for word, times in Counter(self.words).items() if times > 1)
            raise ValueError(f"words must differ from each other, got {twice!r} twice; drop one of them")
        for special in (EOS, UNK):
            if special not in self._index:
                raise ValueError(f"words must hold {special}, got {len(self.words)} without it; add it")
        self.eos, self.unk = self._index[EOS], self._index[UNK]
        self.checksum = hashlib.sha256("\n".join(self.words).encode()).hexdigest()

    @classmethod
    def build(cls, lines: Iterable[Sequence[str]], *, min_count: int = 1, max_size: int | None = None) -> "Vocabulary":
        """Number the words of a text: sorted by how often they occur, then by themselves.

        Args:
            lines: the words of each line.
            min_count: rarer words count as `<unk>`.
            max_size: most words, `<eos>` and `<unk>` among them; the rarest ones beyond count as `<unk>`.
        """
        _checks.whole("min_count", min_count, least=1)
        if max_size is not None:
            _checks.whole("max_size", max_size, least=2)
        counted: Counter[str] = Counter()
        for line in lines:
            counted.update(line)
            counted[EOS] += 1
        special = {EOS: counted.pop(EOS, 0), UNK: counted.pop(UNK, 0)}
        ordered = sorted(counted.items(), key=_by_count)
        kept = [pair for pair in ordered if pair[1] >= min_count][: None if max_size is None else max_size - 2]
        special[UNK] += sum(count for _, count in ordered[len(kept) :])
        return cls([word for word, _ in sorted([*kept, *special.items()], key=_by_count)])

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, line: str) -> list[int]:
        """The numbers of the words of a line, without its end."""
        find, unk = self._index.get, self.unk
        return [find(word, unk) for word in line.split()]

    def decode(self, ids: Iterable[int]) -> str:
        """The words of these numbers, with spaces between; `<eos>` ends a line."""
        return "\n".join(" ".join(self.words[number] for number in line) for line in _lines(ids, self.eos))

    def save(self, path: Path) -> None:
        write_json(path, {"format": _FORMAT, "sha256": self.checksum, "words": list(self.words)})


class Subwords:
    """The pieces of a tokenizer of the `tokenizers` library, read from its JSON file."""

    def __init__(self, path: Path | str) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError(
                "tokenizers must be installed to read its files, got none; run pip install 'robust-attention[hf]'"
            ) from error
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises this class itself
            raise ValueError(f"path must be a tokenizer's JSON file, got {path} ({error}); save one there") from error
        # Special tokens around every line would stand in the middle of the text.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        size = self._tokenizer.get_vocab_size()
        pieces = [self._tokenizer.id_to_token(number) or "" for number in range(size)]
        self.words = tuple(piece.removeprefix("##").lstrip("Ġ▁") for piece in pieces)
        self.unk = self._first("<unk>", "[UNK]", "<|unk|>")
        eos = self._first(EOS, "</s>", "<|endoftext|>", "[SEP]")
        if eos is None:
            raise ValueError(f"the tokenizer must have a token that ends lines, got none in {path}; add {EOS} to it")
        self.eos = eos
        self.checksum = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()

    def _first(self, *names: str) -> int | None:
        found = (self._tokenizer.token_to_id(name) for name in names)
        return next((number for number in found if number is not None), None)

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, line: str) -> list[int]:
        """The numbers of the pieces of a line, without its end."""
        ids: list[int] = self._tokenizer.encode(line, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these numbers; the token that ends lines ends a line."""
        return "\n".join(self._tokenizer.decode(line) for line in _lines(ids, self.eos))

    def save(self, path: Path) -> None:
        write_bytes(path, self._tokenizer.to_str().encode())


def load_coder(path: Path | str) -> Vocabulary | Subwords:
    """Read what `save` of a `Vocabulary` or of `Subwords` wrote; any other JSON is taken for a tokenizer's."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"a vocabulary must be a readable JSON file, got {path} ({error}); build it anew") from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        return Subwords(path)
    words = record.get("words")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{path} must list words, got {type(words).__name__}; build the vocabulary anew")
    vocabulary = Vocabulary(words)
    if vocabulary.checksum != record.get("sha256"):
        raise ValueError(f"{path} must match its SHA-256, got other words; it is damaged, build the vocabulary anew")
    return vocabulary


def read_lines(path: Path | str) -> Iterator[str]:
    """The lines of a text file, plain or `.xz`, one after the other."""
    path = Path(path)
    try:
        opened = lzma.open if path.suffix == ".xz" else open
        with opened(path, "rt", encoding="utf-8", newline="\n") as file:
            yield from file
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"a text must be a file that can be read, got {path} ({error}); check its name") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"a text must be UTF-8, got {path} ({error}); convert it first") from error


def _lines(ids: Iterable[int], eos: int) -> list[list[int]]:
    lines: list[list[int]] = [[]]
    for number in ids:
        if number == eos:
            lines.append([])
        else:
            lines[-1].append(number)
    return lines


def _by_count(pair: tuple[str, int]) -> tuple[int, str]:
    return -pair[1], pair[0]
