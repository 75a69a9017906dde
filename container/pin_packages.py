"""Writes the packages of the images with the digests of their files: container/packages.txt.

    python container/pin_packages.py

Run it with the images' Python, 3.11 on Linux for x86-64, after constraints.txt or an extra of pyproject.toml changed: a
package has the digest of the one file that pip takes there. Versions are those of constraints.txt. A line ends with the
extras that need the package. torch's build and what it brings are in torch_builds, by pin_torch.py.
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from requirements import BUILD, PACKAGES, PROJECT
from resolve import digest, resolved

HERE = Path(__file__).parent
CONSTRAINTS = HERE.parent / "constraints.txt"
OF_TORCH = HERE / "torch_builds/cu130.txt"  # which PyPI has, so that pip resolves it everywhere
NOT_IN_IMAGES = {"all", "bench", "dev", "local", "mcp"}
HEADER = "# The images' packages, the digest of each file (Python 3.11, Linux, x86-64), and the extras that need it: "
HEADER += "python container/pin_packages.py\n"


def main() -> int:
    """Resolve each extra alone and write the union."""
    content = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    found = {word: _resolved(lines) for word, lines in asked(content).items()}
    lines = packages(found, of_torch(OF_TORCH.read_text(encoding="utf-8")))
    (HERE / PACKAGES).write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} packages written to {HERE / PACKAGES}")
    return 0


def asked(pyproject: Mapping[str, Any]) -> dict[str, list[str]]:
    """Requirement lines by word: extras, the project itself, what it is built with."""
    project, build = pyproject["project"], pyproject["build-system"]["requires"]
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name not in NOT_IN_IMAGES}
    return {BUILD: build, PROJECT: [*build, *project["dependencies"]], **extras}


def of_torch(build: str) -> set[str]:
    """Names of the packages in a file of torch_builds."""
    return {canonicalize_name(Requirement(line.partition(" --hash")[0]).name) for line in build.splitlines()[1:]}


def packages(found: Mapping[str, Iterable[Mapping[str, Any]]], left_out: set[str]) -> list[str]:
    """A line for each package that a word's installations have."""
    words: dict[str, list[str]] = defaultdict(list)
    for word, installations in found.items():
        for each in installations:
            name = canonicalize_name(each["metadata"]["name"])
            if name not in left_out:
                words[f"{name}=={each['metadata']['version']} {digest(each)}"].append(word)
    return [f"{line}  # {' '.join(sorted(told))}" for line, told in sorted(words.items())]


def _resolved(lines: list[str]) -> list[Mapping[str, Any]]:
    pins = [line.partition(" --hash")[0] for line in OF_TORCH.read_text(encoding="utf-8").splitlines()]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as build:
        build.write("\n".join(pins))  # digests in constraints would ask for those of all packages
        build.flush()
        return resolved(["--constraint", str(CONSTRAINTS), "--constraint", build.name, *lines])


if __name__ == "__main__":
    sys.exit(main())
