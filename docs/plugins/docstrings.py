"""Docstrings of this package as Markdown: `Args:`, `Numerics:`, `Departs:` and the like become lists and paragraphs."""

import inspect
import re
from typing import Any

import griffe

_SECTION = re.compile(
    r"^(Args|Returns|Parameters|Numerics|Cost|Memory|Gradient|Draws|Reference|Departs|After `fit`):(?: (.*))?$"
)
_ENTRY = re.compile(r"^([\w, ]+): (.*)$")


class Sections(griffe.Extension):
    """Rewrites every docstring before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def _plain(line: str) -> str:
    """Prose with its underscores as they are: after k̂ they would begin emphasis. Code keeps its own."""
    if line.startswith("    "):
        return line
    parts = line.split("`")
    return "`".join(part.replace("_", r"\_") if number % 2 == 0 else part for number, part in enumerate(parts))


def as_markdown(docstring: str) -> str:
    """The docstring with its sections as bold words, their entries as list items."""
    lines = [_plain(line) for line in inspect.cleandoc(docstring).splitlines()]
    out: list[str] = []
    while lines:
        line = lines.pop(0)
        section = _SECTION.match(line)
        if line == "Parameters" and lines and set(lines[0]) == {"-"}:  # as the command line reads them
            out += ["**Options**", ""]
            out += [f"    {name.strip()}" if name.startswith(" ") else f"- **{name}**:" for name in lines[1:]]
            break
        if section is None:
            out.append(line)
            continue
        title, first = section[1], section[2]
        body: list[str] = []
        while lines and lines[0].startswith(" "):
            body.append(lines.pop(0))
        if first:
            out += ["", " ".join([f"**{title}.**", first[0].upper() + first[1:], *(part.strip() for part in body)]), ""]
            continue
        out += ["", f"**{title}**", ""]
        for part in inspect.cleandoc("\n".join(["", *body])).splitlines():
            entry = _ENTRY.match(part)
            out.append(f"    {part.strip()}" if entry is None else f"- **{entry[1]}**: {entry[2]}")
        out.append("")
    return "\n".join(out)
