"""Prints what an image needs beside the code, from pyproject.toml, so that changed code installs nothing anew.

    python requirements.py trainer data > requirements.txt

With extras: their packages, the project's own, and what it is built with. Standard library only.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Requirement lines. Raises KeyError for an extra that the project does not have."""
    content = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    project = content["project"]
    lines = [*content["build-system"]["requires"], *project["dependencies"]]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return lines


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])))
