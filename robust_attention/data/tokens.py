"""Numbered text on disk, mapped into memory, and cut into the segments that a language model learns from.

header    4,096 bytes of JSON, filled up with spaces: format, bytes a number, count, vocabulary size, sources
numbers   little-endian, 2 bytes each for vocabularies of up to 65,536 words, else 4
FILE.sha256 beside it: the checksum of the whole file, as sha256sum prints it
"""

import hashlib
import json
import os
import sys
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robust_attention import _checks
from robust_attention._files import write_bytes
from robust_attention.data.text import Coder, read_lines

_HEADER = 4096
_FORMAT = "robust-attention tokens 1"
_BUFFER = 2**20  # numbers that are collected before they are written


class Tokens:
    """A numbered text: N numbers from 0 to size - 1, in memory or mapped from a file."""

    def __init__(self, ids: Tensor, size: int, about: dict[str, str] | None = None) -> None:
        """
        Args:
            ids: `[N]`; int64, or int16 and int32 with the bits of unsigned numbers.
            size: of the vocabulary.
            about: what the text was made from.
        """
        _checks.whole("size", size, least=1)
        if ids.ndim != 1 or ids.dtype not in (torch.int16, torch.int32, torch.int64):
            raise ValueError(f"ids must be whole numbers [N], got {ids.dtype} {list(ids.shape)}; call .long()")
        self._ids, self.size, self.about = ids, size, about or {}
        self._mask = 0xFFFF if ids.dtype == torch.int16 else -1

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The numbers from `start` to before `stop`, int64 `[n]`."""
        return self._checked(self._ids[start:stop])

    def rows(self, starts: Tensor, length: int) -> Tensor:
        """`[n, length]`, int64: the numbers from each start on."""
        return self._checked(self._ids[starts[:, None] + torch.arange(length)])

    def _checked(self, ids: Tensor) -> Tensor:
        # On the host: on a GPU a number that is out of range ends the process without saying which.
        ids = ids.long() & self._mask
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.size:
            raise ValueError(
                f"token ids must lie from 0 to size - 1 = {self.size - 1}, got {int(ids.min())} to {int(ids.max())}; "
                "encode the text with the vocabulary of the model"
            )
        return ids

    @classmethod
    def write(
        cls, path: Path, lines: Iterable[Sequence[int]], size: int, about: dict[str, str] | None = None
    ) -> "Tokens":
        """Write the numbers of all lines one after the other, whole or not at all, and open the file."""
        _checks.whole("size", size, least=1)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")  # two processes may make the same file
        buffer = array("H" if size <= 2**16 else "I")
        count = 0

        def flush(file: Any) -> None:
            nonlocal count
            if buffer and max(buffer) >= size:
                raise ValueError(f"token ids must lie from 0 to size - 1 = {size - 1}, got {max(buffer)}")
            count += len(buffer)
            if sys.byteorder == "big":
                buffer.byteswap()
            file.write(buffer.tobytes())
            del buffer[:]

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb+") as file:
                file.write(b" " * _HEADER)
                for line in lines:
                    _extend(buffer, line, size)
                    if len(buffer) >= _BUFFER:
                        flush(file)
                flush(file)
                if count == 0:
                    raise ValueError(f"a text must have at least one word, got none for {path}; check its source")
                file.seek(0)
                file.write(_header(count, buffer.itemsize, size, about or {}))
                file.flush()
                os.fsync(file.fileno())
                file.seek(0)
                checksum = hashlib.file_digest(file, "sha256").hexdigest()
            part.replace(path)
            write_bytes(_sidecar(path), f"{checksum}  {path.name}\n".encode())
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return cls.open(path, verify=False)

    @classmethod
    def open(cls, path: Path | str, *, verify: bool = True) -> "Tokens":
        """Map a file that `write` made; `verify` reads it once and compares its checksum."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(_HEADER))
                length = file.seek(0, os.SEEK_END)
                file.seek(0)
                checksum = hashlib.file_digest(file, "sha256").hexdigest() if verify else None
            wanted = _sidecar(path).read_text(encoding="utf-8").split()[0] if verify else None
            count, width, size = header["count"], header["bytes"], header["size"]
            if header["format"] != _FORMAT or width not in (2, 4) or length != _HEADER + count * width:
                raise ValueError("its header and its length do not fit")
            if checksum != wanted:
                raise ValueError("it does not match its SHA-256")
        except OSError as error:
            raise ValueError(f"{path} must be a token file, got none ({error}); tokenise the text anew") from error
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{path} must be a whole token file, got a damaged one ({error}); remove it") from error
        if sys.byteorder == "big":
            raise ValueError("token files can be mapped on little-endian machines only, got a big-endian one")
        mapped = torch.from_file(str(path), shared=False, size=length, dtype=torch.uint8)
        ids = mapped[_HEADER:].view(torch.int16 if width == 2 else torch.int32)
        return cls(ids, size, header["about"])


class Windows:
    """A text cut into segments of `context` tokens that do not overlap: the examples of `fit`.

    Example i is `(inputs, targets)`, `[context]` each: tokens i·context … and the tokens one place further. The last
    tokens, too few for a segment, are left out.
    """

    def __init__(self, tokens: Tokens, context: int) -> None:
        _checks.whole("context", context, least=1)
        if len(tokens) <= context:
            raise ValueError(
                f"a text must have more than context = {context} tokens, got {len(tokens)}; take a longer text"
            )
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def batch(self, indices: Tensor, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """`(inputs, targets)`, int64 `[n, context]` each. The seed changes nothing: text is not augmented."""
        rows = self.tokens.rows(indices * self.context, self.context + 1)
        if device.type == "cuda":
            rows = rows.pin_memory().to(device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]


def tokenise(lines: Iterable[str], coder: Coder) -> Iterable[list[int]]:
    """The numbers of each line, with the one that ends it."""
    for line in lines:
        yield [*coder.encode(line), coder.eos]


def tokenised(source: Path, coder: Coder, path: Path) -> Tokens:
    """The text of `source` as the token file `path`: made unless it is there, whole, and of this source and coder."""
    about = {"source": source.name, "sha256": _checksum(source), "coder": coder.checksum}
    if path.exists():
        try:
            found = Tokens.open(path)
            if found.about == about:
                return found
        except ValueError:
            pass  # a crash cut it, or its checksum: made anew
    return Tokens.write(path, tokenise(read_lines(source), coder), len(coder.words), about)


def _extend(buffer: "array[int]", line: Sequence[int], size: int) -> None:
    try:
        buffer.extend(line)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be whole numbers from 0 to size - 1 = {size - 1}, got {line}") from error


def _header(count: int, width: int, size: int, about: dict[str, str]) -> bytes:
    text = json.dumps({"format": _FORMAT, "bytes": width, "count": count, "size": size, "about": about}).encode()
    if len(text) > _HEADER:
        raise ValueError(f"about must fit into {_HEADER} bytes of JSON, got {len(text)}; shorten it")
    return text.ljust(_HEADER)


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _checksum(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"a text must be a file that can be read, got {path} ({error}); check its name") from error
