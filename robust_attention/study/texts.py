"""The texts of a language cell: numbered, the training text by the vocabulary that it gives."""

import os
from collections.abc import Callable
from hashlib import file_digest
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import distributed as dist

from robust_attention._config import digest
from robust_attention._files import alone
from robust_attention.data.sentences import paragraphs
from robust_attention.data.text import Coder, Subwords, Vocabulary, load_coder, read_lines
from robust_attention.data.tokens import Tokens, tokenise, tokenised
from robust_attention.recipes.language import TextData

T = TypeVar("T")


class Texts(NamedTuple):
    """Three texts and what numbers them."""

    coder: Coder
    train: Tokens
    valid: Tokens
    test: Tokens


def load_texts(config: TextData, cache: Path) -> Texts:
    """Read the texts; nothing is fetched. Those from files are numbered once, into token files in `cache`."""
    if config.name == "generated":
        return _generated(config)
    for name in ("train", "valid", "test"):
        if not getattr(config, name):
            raise ValueError(f"data.{name} must name a file in data.root, got nothing; set it")
    if not config.root:
        raise ValueError(f"data.root must be the folder of {config.train}, got nothing; pass --root FOLDER")

    def make() -> Texts:
        cache.mkdir(parents=True, exist_ok=True)
        with alone(cache):
            root = Path(config.root)
            coder = _coder(config, root, cache)
            parts = (root / config.train, root / config.valid, root / config.test)
            return Texts(coder, *(tokenised(part, coder, cache / _name(part, coder)) for part in parts))

    return _once_a_machine(make)


def _generated(config: TextData) -> Texts:
    """Each part of a seed of its own; the words are the same for all."""
    lines = {
        "train": list(paragraphs(config.lines, seed=0)),
        "valid": list(paragraphs(config.lines // 10, seed=1)),
        "test": list(paragraphs(config.lines // 10, seed=2)),
    }
    coder = Vocabulary.build(
        (line.split() for line in lines["train"]), min_count=config.min_count, max_size=config.max_size
    )
    numbered = {
        part: torch.tensor([number for line in tokenise(of, coder) for number in line]) for part, of in lines.items()
    }
    return Texts(coder, *(Tokens(numbered[part], len(coder)) for part in ("train", "valid", "test")))


def _coder(config: TextData, root: Path, cache: Path) -> Coder:
    """The tokenizer that is named, or the words of the training text, counted once and kept in the cache."""
    if config.tokenizer:
        return Subwords(root / config.tokenizer)
    source = root / config.train
    try:
        with source.open("rb") as file:
            made_of = file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"a text must be a file that can be read, got {source} ({error}); check data.root") from error
    path = cache / f"words-{digest([made_of, config.min_count, config.max_size])}.json"
    if path.exists():
        try:
            return load_coder(path)
        except ValueError:
            pass  # damaged: counted anew
    words = (line.split() for line in read_lines(source))
    vocabulary = Vocabulary.build(words, min_count=config.min_count, max_size=config.max_size)
    vocabulary.save(path)
    return vocabulary


def _name(part: Path, coder: Coder) -> str:
    return f"{part.name.removesuffix('.xz')}.{coder.checksum[:16]}"


def _once_a_machine(make: Callable[[], T]) -> T:
    """Under torchrun the first process of each machine makes it, the others find it made."""
    if not (dist.is_available() and dist.is_initialized()):
        return make()
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        if first:
            made = make()
    finally:
        dist.barrier()
    return made if first else make()
