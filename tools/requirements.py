"""Print every requirement of the project and its `dev` extra, one a line, for tools/setup."""

import tomllib
from pathlib import Path


def requirements(project: dict, extra: str) -> list[str]:
    """The requirements of `extra`, with extras of the project itself replaced by what they hold."""
    found: list[str] = []
    for line in project["optional-dependencies"][extra]:
        if line.startswith(project["name"] + "["):
            for inner in line.split("[", 1)[1].rstrip("]").split(","):
                found += requirements(project, inner)
        else:
            found.append(line)
    return found


if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    print("\n".join(project["dependencies"] + requirements(project, "dev")))
