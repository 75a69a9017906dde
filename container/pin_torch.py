"""Writes the versions of a build of torch and of the CUDA packages that it brings: container/torch_builds/BUILD.txt.

    python container/pin_torch.py cu126 --index-url INDEX

BUILD is torch's own name of it, the text behind the plus of its version: cu130, cu126, cpu. pip resolves it from the
given index, or from those that it is configured with. Where torch accepts a range of versions, the lowest is taken:
that of the CUDA release which torch was built with. Later ones are for later drivers. Run it with the images' Python,
3.11 on Linux for x86-64: a package has the digest of the one file that pip takes there.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import Specifier
from packaging.utils import canonicalize_name
from packaging.version import Version
from resolve import digest, resolved

FOLDER = Path(__file__).with_name("torch_builds")
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
ON_PYPI = "cu130"  # of this torch: PyPI's wheel has no build in its version
OF_CUDA = re.compile(r"(nvidia|cuda)-|triton$")


def main() -> int:
    """Resolve, pin, resolve again with the pins, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", help="such as cu126")
    parser.add_argument("--index-url", help="where torch is; without it, where pip is configured to look")
    options = parser.parse_args()
    torch = torch_requirement(options.build, CONSTRAINTS.read_text(encoding="utf-8"))
    index = ["--index-url", options.index_url] if options.index_url else []
    pins = [torch, *pins_of(resolved([*index, torch]))]
    lines, unused = with_digests(pins, resolved([*index, *pins]))
    if unused:
        sys.exit(f"with the pins, torch brings none of {', '.join(unused)}: nothing was written")
    FOLDER.joinpath(f"{options.build}.txt").write_text(
        header(options.build) + "\n".join(lines) + "\n", encoding="utf-8"
    )
    print(f"{len(pins)} versions written to {FOLDER / options.build}.txt")
    return 0


def header(build: str) -> str:
    """What the file is, as a comment."""
    return f"# torch's build {build} and what it brings, for the images: python container/pin_torch.py {build}\n"


def torch_requirement(build: str, constraints: str) -> str:
    """The torch of constraints.txt in this build. `===` keeps others of the same version out, which `==` takes."""
    (version,) = re.findall(r"^torch==(\S+)$", constraints, re.M)
    return f"torch==={version}" if build == ON_PYPI else f"torch=={version}+{build}"


def pins_of(report: Iterable[Mapping[str, Any]]) -> list[str]:
    """Requirement lines of the CUDA packages in the installations of pip's report."""
    installed = [each["metadata"] for each in report]
    needed: dict[str, list[Specifier]] = {canonicalize_name(each["name"]): [] for each in installed}
    for each in installed:
        for line in each.get("requires_dist", ()):
            requirement = Requirement(line)
            needed.setdefault(canonicalize_name(requirement.name), []).extend(requirement.specifier)
    return [
        f"{name}=={lowest(needed[name]) or each['version']}"
        for name, each in sorted((canonicalize_name(each["name"]), each) for each in installed)
        if OF_CUDA.match(name)
    ]


def lowest(needed: Iterable[Specifier]) -> str | None:
    """The lowest version that is named, where a range is; None where one version is asked for, or none is named."""
    bounds = [each.version for each in needed if each.operator == ">="]
    exact = any(each.operator in ("==", "===") and not each.version.endswith("*") for each in needed)
    return None if exact or not bounds else max(bounds, key=Version)


def with_digests(pins: Iterable[str], report: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """The pins with the digests of the files that pip's report would install, and those that it has no file for."""
    files = {canonicalize_name(each["metadata"]["name"]): each for each in report}
    names = {pin: canonicalize_name(Requirement(pin).name) for pin in pins}
    lines = [f"{pin} {digest(files[name])}" for pin, name in names.items() if name in files]
    return lines, [pin for pin, name in names.items() if name not in files]


if __name__ == "__main__":
    sys.exit(main())
