"""Results on disk: a folder that is known to take them, and files that are written whole or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHUNK = 2**24
"""Bytes handed to the system at once."""


def prepare_folder(out: Path, needed_mib: int = 4) -> None:
    """Make the folder and write as much into it as the results need, before any work; raise OSError if it cannot be."""
    probe = out / ".probe"
    try:
        out.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(os.urandom(needed_mib * 2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(
            f"--out must be a folder that can be written to, with {needed_mib} MiB free, got {out} "
            f"({error.strerror or error}); choose another folder"
        ) from error
    finally:
        if out.is_dir():
            probe.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write all or nothing, and return only when the disk has it: a kill or a power cut leaves the old file or the new.

    The bytes go to `<name>.part` beside it, which is renamed once it is safely on the disk, and removed if it cannot
    be finished.
    """
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            view = memoryview(data)
            for start in range(0, len(view), CHUNK):
                file.write(view[start : start + CHUNK])
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_json(path: Path, record: Any) -> None:
    """Write all or nothing; NaN and Inf are refused."""
    text = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    write_bytes(path, text.encode())


def _sync_folder(folder: Path) -> None:
    # A renamed file survives a power cut only once its folder is on the disk too. Windows has no such call.
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time in a folder: whoever comes second finds the work done.

    The processes of one torchrun belong together, and none of them waits.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows, where two processes may do the same work twice
        yield
        return
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        yield
        return
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
