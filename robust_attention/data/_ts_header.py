"""What a `.ts` file declares before @data, and the error that every part of the reader raises."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn


class TSError(ValueError):
    """A file that is no `.ts` file, or contradicts itself. Lines and columns count from 1; None: the whole file."""

    def __init__(self, path: str, line: int | None, column: int | None, message: str) -> None:
        place = "".join(f":{part}" for part in (line, column) if part is not None)
        super().__init__(f"{path}{place}: {message}")
        self.path, self.line, self.column, self.message = path, line, column, message

    def __reduce__(self) -> tuple[type["TSError"], tuple[str, int | None, int | None, str]]:
        # Exceptions that take more than a message do not pass between processes without this.
        return type(self), (self.path, self.line, self.column, self.message)


class Place(NamedTuple):
    """A line of a file."""

    path: str
    line: int | None

    def fail(self, column: int | None, message: str) -> NoReturn:
        raise TSError(self.path, self.line, column, message)


class Word(NamedTuple):
    """A word of a declaration."""

    text: str
    column: int


KEYS = (
    "problemname",
    "timestamps",
    "missing",
    "univariate",
    "dimensions",
    "equallength",
    "serieslength",
    "classlabel",
    "data",
)


@dataclass
class Header:
    """The declarations so far; None for what has not been declared."""

    seen: dict[str, int | None] = field(default_factory=dict)
    """Declared names and their lines."""
    name: str = ""
    missing: bool | None = None
    univariate: bool | None = None
    dimensions: int | None = None
    equal: bool | None = None
    length: int | None = None
    labelled: bool | None = None
    classes: dict[str, int] = field(default_factory=dict)
    """Each class and its place."""

    @property
    def complete(self) -> bool:
        """Whether @data was read."""
        return "data" in self.seen

    def declare(self, text: str, place: Place) -> None:
        """Take one line that starts with @."""
        (name, column), *values = [Word(found.group(), found.start() + 1) for found in re.finditer(r"\S+", text)]
        key = name[1:].lower()
        key = "dimensions" if key == "dimension" else key
        if key not in KEYS:
            place.fail(column, f"must be one of {', '.join('@' + known for known in KEYS)}, got {shown(name)}")
        if key in self.seen:
            place.fail(column, f"@{key} must be declared once, got it again after line {self.seen[key]}")
        self.seen[key] = place.line
        end = len(text) + 1
        if key == "problemname":
            self.name = " ".join(value.text for value in values)
        elif key == "timestamps":
            if _flag(values, end, place):
                place.fail(values[0].column, "@timeStamps must be false, got true; time stamps are not read")
        elif key == "missing":
            self.missing = _flag(values, end, place)
        elif key == "univariate":
            self.univariate = _flag(values, end, place)
        elif key == "equallength":
            self.equal = _flag(values, end, place)
        elif key == "dimensions":
            self.dimensions = _count(values, end, place)
        elif key == "serieslength":
            self.length = _count(values, end, place)
        elif key == "classlabel":
            self._list_classes(values, end, place)
        else:
            self._start(values, place)

    def _list_classes(self, values: Sequence[Word], end: int, place: Place) -> None:
        self.labelled = _flag(values[:1], end, place)
        for name, column in values[1:]:
            if not self.labelled:
                place.fail(column, f"no class must follow @classLabel false, got {shown(name)}")
            if ":" in name:
                place.fail(column, f"a class must have no colon, which parts dimensions, got {shown(name)}")
            if name in self.classes:
                place.fail(column, f"a class must be listed once, got {shown(name)} again")
            self.classes[name] = len(self.classes)
        if self.labelled and not self.classes:
            place.fail(end, "@classLabel true must list the classes, got none")

    def _start(self, values: Sequence[Word], place: Place) -> None:
        """@data: the declarations are complete, and must agree."""
        if values:
            place.fail(values[0].column, f"@data must stand alone on its line, got {shown(values[0].text)} after it")
        if self.labelled is None:
            place.fail(1, "@classLabel must come before @data, got none; write @classLabel true and the classes")
        if self.univariate and self.dimensions not in (None, 1):
            place.fail(1, f"@dimensions must be 1 where @univariate is true, got {self.dimensions}")
        if self.univariate:
            self.dimensions = 1


def shown(text: str) -> str:
    """A part of a file in an error."""
    return repr(text if len(text) <= 40 else text[:40] + "…")


def _flag(values: Sequence[Word], end: int, place: Place) -> bool:
    value, column = _only(values, end, "true or false", place)
    if value.lower() not in ("true", "false"):
        place.fail(column, f"must be true or false, got {shown(value)}")
    return value.lower() == "true"


def _count(values: Sequence[Word], end: int, place: Place) -> int:
    value, column = _only(values, end, "a whole number", place)
    if not re.fullmatch(r"[1-9][0-9]{0,8}", value):
        place.fail(column, f"must be a whole number from 1 to 999999999, got {shown(value)}")
    return int(value)


def _only(values: Sequence[Word], end: int, what: str, place: Place) -> Word:
    if len(values) != 1:
        place.fail(values[1].column if values else end, f"must be {what}, got {len(values)} words")
    return values[0]
