"""Prints the packages of an image with the digests of their files, as pip's --require-hashes reads them.

    python requirements.py trainer data > requirements.txt

With extras of pyproject.toml: what they need, and what the project itself needs; the word `build` alone prints only
what the project is built with. Lines come from packages.txt, which pin_packages.py writes. torch's build and what it
brings are in torch_builds. Standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

PACKAGES = "packages.txt"
PROJECT, BUILD = "project", "build"  # words for what no extra names


def requirements(packages: str, words: Iterable[str]) -> list[str]:
    """Requirement lines of the packages that a word asks for. Raises ValueError for a word that no line has."""
    asked = set(words)
    if BUILD not in asked:
        asked.add(PROJECT)
    lines = [line.partition("  # ") for line in packages.splitlines() if not line.startswith("#")]
    known = {word for _, _, told in lines for word in told.split()}
    if unknown := sorted(asked - known):
        raise ValueError(f"{', '.join(unknown)}: expected extras that {PACKAGES} has: {', '.join(sorted(known))}")
    return [line for line, _, told in lines if asked.intersection(told.split())]


def main() -> int:
    try:
        lines = requirements(Path(__file__).with_name(PACKAGES).read_text(encoding="utf-8"), sys.argv[1:])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 64
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
