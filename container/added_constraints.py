"""Prints constraints for packages that are added to an image: its own versions, and for all others those of a file.

    python3 added_constraints.py constraints.txt > added.txt

So that pip replaces nothing that the image came with. Standard library only.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path


def added_constraints(pins: str) -> list[str]:
    """Lines name==version, of what is installed here and of what else `pins` has."""
    installed = {_canonical(one.name): one.version for one in metadata.distributions()}
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", pins, re.MULTILINE))
    new = {name: version for name, version in pinned.items() if _canonical(name) not in installed}
    return [f"{name}=={version}" for name, version in sorted((installed | new).items())]


def _canonical(name: str) -> str:
    """As in names of wheels (packaging.python.org, name normalization)."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    print("\n".join(added_constraints(Path(sys.argv[1]).read_text(encoding="utf-8"))))
