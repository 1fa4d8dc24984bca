"""Results on disk: one JSON line a cell, appended whole; the newest line of a cell counts."""

import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def append(path: Path, record: dict[str, Any]) -> None:
    """Add one line and wait until the disk has it; NaN and Inf are refused."""
    line = json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    _mend(path)
    with path.open("ab") as file:
        start = file.tell()
        try:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            # Half a line would be read as damage; nothing of it may stay.
            os.truncate(path, start)
            raise OSError(f"{path} must take one line more, got {error.strerror or error}; free some space") from error


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Every cell's newest line, in the order in which cells first appear; a line cut by a crash is left out, aloud."""
    cells: dict[str, dict[str, Any]] = {}
    for path in paths:
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                cell = record["cell"]
            except (ValueError, KeyError, TypeError):
                warnings.warn(f"{path}:{number} is no whole line of results and is left out", stacklevel=1)
                continue
            # A cell that was done stays done, whatever a later try of it met.
            if cell not in cells or record["status"] == "done" or cells[cell]["status"] != "done":
                cells[cell] = record
    return list(cells.values())


def result_files(out: Path) -> list[Path]:
    """The files of all shards in a folder, or the one file that is named."""
    if out.is_file():
        return [out]
    return sorted(out.glob("cells*.jsonl"))


def _mend(path: Path) -> None:
    """End a line that a crash cut, so that the next one starts on its own."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
