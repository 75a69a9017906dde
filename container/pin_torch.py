"""Writes the versions of a build of torch and of the CUDA packages that it brings: container/torch_builds/BUILD.txt.

    python container/pin_torch.py cu126 --index-url INDEX

BUILD is torch's own name of it, the text behind the plus of its version: cu130, cu126, cpu. pip resolves it from the
given index, or from those that it is configured with. Where torch accepts a range of versions, the lowest is taken:
that of the CUDA release which torch was built with. Later ones are for later drivers.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import Specifier
from packaging.utils import canonicalize_name
from packaging.version import Version

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
    pins = [torch, *pins_of(_resolved([torch], index))]
    resolved = {canonicalize_name(each["metadata"]["name"]) for each in _resolved(pins, index)}
    unused = [pin for pin in pins if canonicalize_name(Requirement(pin).name) not in resolved]
    if unused:
        sys.exit(f"with the pins, torch brings none of {', '.join(unused)}: nothing was written")
    FOLDER.joinpath(f"{options.build}.txt").write_text(header(options.build) + "\n".join(pins) + "\n", encoding="utf-8")
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


def _resolved(requirements: list[str], index: list[str]) -> list[Mapping[str, Any]]:
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", report.name, *index, *requirements]
        subprocess.run(command, check=True)
        found: list[Mapping[str, Any]] = json.loads(Path(report.name).read_text(encoding="utf-8"))["install"]
        return found


if __name__ == "__main__":
    sys.exit(main())
