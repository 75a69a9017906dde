"""What the images hold beside what the tests import: the same versions, but for torch's build and what that brings."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

BUILDS = {path.stem: path for path in sorted((ROOT / "container/torch_builds").glob("*.txt"))}
RECIPES = {"trainer": "cu130", "pipeline": "cpu"}  # the build that each installs by default
BUILT_WITH = {"pip", "setuptools"}  # of the base image, or of the environment


def pins(path: Path) -> dict[str, str]:
    """Versions of a constraints file by package."""
    lines = (re.fullmatch(r"([\w.-]+)===?(\S+)", line) for line in path.read_text(encoding="utf-8").splitlines())
    return {canonicalize_name(match[1]): match[2] for match in lines if match}


def extras(recipe: str) -> list[str]:
    """The extras of pyproject.toml that a recipe installs."""
    text = (ROOT / f"container/{recipe}.Dockerfile").read_text()
    (words,) = re.findall(r"python requirements\.py (.*) > requirements\.txt", text)
    return [word for word in words.split() if not word.startswith("$")]


def required(lines: Iterable[str], extra: str = "") -> Iterator[Requirement]:
    """The requirements that apply here."""
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def closure(recipe: str) -> dict[str, str | None]:
    """Packages of an image as this environment has them, all that they need too; None: not installed here."""
    command = [sys.executable, "container/requirements.py", *extras(recipe)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    waiting, found = list(required(printed.splitlines())), dict[str, str | None]()
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                here = metadata.distribution(name)
            except metadata.PackageNotFoundError:
                found[name] = None
                continue
            found[name] = here.version
            waiting += required(here.requires or (), extra)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_tests_import_the_versions_that_the_image_holds(recipe: str) -> None:
    wanted = pins(ROOT / "constraints.txt")
    build = pins(BUILDS[RECIPES[recipe]])
    here = closure(recipe)
    assert {"torch", "transformers", "pydantic", "filelock"} <= here.keys()
    differences = {
        name: (version, wanted.get(name))
        for name, version in here.items()
        if name not in BUILT_WITH and (version or "").partition("+")[0] != wanted.get(name)
    }
    assert differences.keys() <= build.keys() - {"torch"}, "only torch's build may differ"


@pytest.mark.parametrize("build", BUILDS)
def test_a_build_of_torch_contradicts_no_pin_of_the_project(build: str) -> None:
    wanted, own = pins(ROOT / "constraints.txt"), pins(BUILDS[build])
    assert own["torch"].partition("+")[0] == wanted["torch"]
    assert {name for name in own if name in wanted} == {"torch"}
    assert own["torch"].partition("+")[2] in ("", build)


def test_every_package_of_cuda_that_torch_brings_is_pinned() -> None:
    cu130 = pins(BUILDS["cu130"])
    assert cu130["nvidia-nccl-cu13"] == "2.29.7"  # whose plugins' versions the guide names
    assert all(version.startswith("13.0.") for name, version in cu130.items() if name.startswith("nvidia-cuda-"))
    assert {"triton", "cuda-toolkit", "nvidia-cublas", "nvidia-nvjitlink"} <= cu130.keys()


@pytest.fixture(scope="module")
def pin_torch() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pin_torch", ROOT / "container/pin_torch.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REPORT = [
    {
        "metadata": {
            "name": "torch",
            "version": "2.13.0",
            "requires_dist": [
                "cuda-toolkit[cufft]==13.0.3", "nvidia-nccl-cu13==2.29.7", "cuda-bindings<14,>=13.0.3", "sympy",
            ],
        }
    },
    {"metadata": {"name": "cuda_toolkit", "version": "13.0.3.0", "requires_dist": ["nvidia-nvjitlink<14,>=13.0.88"]}},
    {"metadata": {"name": "nvidia-nvjitlink", "version": "13.5.37"}},
    {"metadata": {"name": "nvidia-nccl-cu13", "version": "2.29.7"}},
    {"metadata": {"name": "cuda-bindings", "version": "13.5.0", "requires_dist": ["nvidia-made-up"]}},
    {"metadata": {"name": "nvidia-made-up", "version": "1.0"}},
    {"metadata": {"name": "triton", "version": "3.7.1"}},
    {"metadata": {"name": "sympy", "version": "1.14.0"}},
]  # fmt: skip


def test_pins_are_the_lowest_versions_that_torch_takes_and_only_of_cuda(pin_torch: ModuleType) -> None:
    assert pin_torch.pins_of(REPORT) == [
        "cuda-bindings==13.0.3",
        "cuda-toolkit==13.0.3.0",
        "nvidia-made-up==1.0",
        "nvidia-nccl-cu13==2.29.7",
        "nvidia-nvjitlink==13.0.88",
        "triton==3.7.1",
    ]


def test_a_build_of_pypi_keeps_out_others_of_the_same_version(pin_torch: ModuleType) -> None:
    assert pin_torch.torch_requirement("cu130", "a==1\ntorch==2.13.0\n") == "torch===2.13.0"
    assert pin_torch.torch_requirement("cu126", "torch==2.13.0\n") == "torch==2.13.0+cu126"
    constraints = (ROOT / "constraints.txt").read_text()
    for build, path in BUILDS.items():
        assert pin_torch.torch_requirement(build, constraints) in path.read_text().splitlines()
