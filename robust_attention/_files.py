"""Results on disk: a folder that is known to take them, and files that are written whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


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


def write_json(path: Path, record: Any) -> None:
    """Write all or nothing; NaN and Inf are refused."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)
