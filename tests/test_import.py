"""What importing the package costs, and which rooms may look into which."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "robust_attention"

IMPORT = """
import json, sys
before = set(sys.modules)
import robust_attention
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""


def test_import_loads_neither_triton_nor_anything_optional() -> None:
    out = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout
    loaded = set(json.loads(out))
    torch_alone = subprocess.run(
        [sys.executable, "-c", IMPORT.replace("import robust_attention", "import torch")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    allowed = set(json.loads(torch_alone)) | set(sys.stdlib_module_names) | {"robust_attention"}
    assert loaded <= allowed, loaded - allowed
    assert not loaded & {"triton", "matplotlib", "rich", "cyclopts", "transformers", "timm"}


def test_torch_is_the_only_requirement() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert [line.split(">")[0] for line in project["dependencies"]] == ["torch"]


# Imports point one way: a room may look into those to its left.
ROOMS = [
    "typing",
    "robust",
    "ops",
    "density",
    "nn",
    "adapters",
    "models",
    "data",
    "attacks",
    "training",
    "eval",
    "recipes",
    "study",
    "plots",
    "bench",
    "demo",
    "explain",
    "cli",
]


def rooms_imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("robust_attention."):
                found.add(name.split(".")[1])
    return found & set(ROOMS)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room not in ROOMS:
        assert room.startswith("_") or room == "__init__", f"name the room {room!r} in ROOMS of this test"
        return
    below = set(ROOMS[: ROOMS.index(room) + 1])
    assert rooms_imported(path) <= below, rooms_imported(path) - below
