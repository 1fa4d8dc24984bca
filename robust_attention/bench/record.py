"""The benchmark's JSON: complete after every row, and gone on with when it is started again."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from robust_attention._files import prepare_folder, write_json
from robust_attention._provenance import provenance
from robust_attention.bench.measure import ceilings
from robust_attention.bench.scales import Scale

Say = Any
"""A function of one line of text."""
_SAME = ("scale", "dtype", "threads", "commit", "sources", "versions", "hardware")
# What must agree for rows of an earlier run to stand beside new ones.


@dataclass(frozen=True)
class Record:
    """One benchmark: its rows, and where they go."""

    scale: Scale
    out: Path
    say: Say
    content: dict[str, Any]

    @classmethod
    def open(cls, name: str, scale: Scale, out: Path, say: Say) -> "Record":
        """Rows that `bench.json` holds from the same code, versions and machine are kept; others are put aside."""
        prepare_folder(out)
        found: dict[str, Any] = {"study": "bench", "scale": name, "dtype": str(scale.dtype).removeprefix("torch.")}
        found |= {"threads": torch.get_num_threads(), "sources": sources(), **provenance(scale.device)}
        stored = _stored(out / "bench.json")
        if stored:
            other = [key for key in _SAME if stored.get(key) != found[key]]
            if not other:
                say(f"{len(stored['rows'])} rows of an earlier run are kept")
                return cls(scale, out, say, stored)
            aside = out / f"bench-{stored.get('date', 'undated')}.json"
            (out / "bench.json").replace(aside)
            say(f"the rows in bench.json are of another {', '.join(other)}: put aside as {aside.name}")
        found |= {"rows": [], "ceilings": ceilings(scale.device, scale.dtype)}
        return cls(scale, out, say, found)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.content["rows"]

    def find(self, **wanted: Any) -> dict[str, Any] | None:
        """The row with these entries, if it is there."""
        return next((row for row in self.rows if all(row.get(key) == x for key, x in wanted.items())), None)

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        self.write()
        ratio = f"{row['ratio']:8.2f} × SDPA" if row.get("ratio") is not None else ""
        wrong = f"  NOT TIMED: {row['check']}" if "ms" not in row else ""
        time = f"{row['ms']:10.3f} ms" if row.get("ms") is not None else " " * 13
        mode = "" if row["mode"] == row["kind"] else row["mode"]
        self.say(f"{row['kind']:9} {row['method']:8} {row['what']:31} {mode:17} {row['impl']:10}{time}{ratio}{wrong}")

    def write(self) -> None:
        write_json(self.out / "bench.json", self.content)


def _stored(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} must hold a benchmark's JSON, got {error}; move it away") from error


def sources() -> str:
    """A digest of the package's own files: what a commit does not say about a tree that was changed since."""
    root, digest = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
