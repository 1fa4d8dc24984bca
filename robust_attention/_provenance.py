"""Where and with what a number was measured; every stored row carries it."""

import datetime
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from robust_attention._version import __version__


def provenance(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Commit (None outside a checkout of this project), versions, hardware and date."""
    return {
        "commit": _commit(),
        "versions": {
            "robust_attention": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "hardware": torch.cuda.get_device_name() if torch.device(device).type == "cuda" else processor(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def processor() -> str:
    """The CPU's name and its cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


@cache
def _commit() -> str | None:
    # Asked once: what runs is what was loaded, whatever is checked out meanwhile.
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():  # installed, perhaps inside a repository of somebody else
        return None
    try:
        asked = ("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
        found = subprocess.run(asked, capture_output=True, text=True, cwd=root, check=False)
    except OSError:
        return None
    return found.stdout.strip() or None
