"""What the images hold beside what the tests import: the same versions, but for torch's build and what that brings."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

BUILDS = {path.stem: path for path in sorted((ROOT / "container/torch_builds").glob("*.txt"))}
RECIPES = {"trainer": "cu130", "pipeline": "cpu"}  # the build that each installs by default
BUILT_WITH = {"pip", "setuptools"}  # of the base image, or of the environment


def pins(path: Path) -> dict[str, str]:
    """Versions of a constraints file by package."""
    lines = (re.match(r"([\w.-]+)===?(\S+)", line) for line in path.read_text(encoding="utf-8").splitlines())
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
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked = [*content["build-system"]["requires"], *content["project"]["dependencies"]]
    for extra in extras(recipe):
        asked += content["project"]["optional-dependencies"][extra]
    waiting, found = list(required(asked)), dict[str, str | None]()
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


def printed(*words: str) -> subprocess.CompletedProcess[str]:
    """What container/requirements.py prints for these words."""
    command = [sys.executable, str(ROOT / "container/requirements.py"), *words]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_image_installs_every_package_that_it_needs_at_the_pinned_version_by_digest(recipe: str) -> None:
    lines = printed(*extras(recipe)).stdout.splitlines() + BUILDS[RECIPES[recipe]].read_text().splitlines()[1:]
    form = re.compile(r"([\w.-]+)===?(\S+)( --hash=sha256:[0-9a-f]{64})+")
    matches = [form.fullmatch(line) for line in lines]
    assert all(matches), "pip installs no other line by --require-hashes"
    versions = {canonicalize_name(match[1]): match[2] for match in matches if match}
    assert len(versions) == len(lines), "one version of each"
    here = closure(recipe)
    assert here.keys() <= versions.keys(), "pip resolves nothing when it builds the image"
    wanted = pins(ROOT / "constraints.txt") | pins(BUILDS[RECIPES[recipe]])
    assert {name: version for name, version in versions.items() if name not in BUILT_WITH} == {
        name: wanted.get(name) for name in versions if name not in BUILT_WITH
    }


def test_every_extra_that_an_image_may_have_meets_what_the_project_asks_for() -> None:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked: dict[str, list[str]] = content["project"]["optional-dependencies"]
    of_torch = pins(BUILDS["cu130"])
    for extra in asked.keys() - {"all", "bench", "dev", "local", "mcp"}:
        found = [re.match(r"(\S+?)==(\S+)", line) for line in printed(extra).stdout.splitlines()]
        versions = of_torch | {match[1]: match[2] for match in found if match}
        assert found, f"no digests for {extra}: python container/pin_packages.py"
        for requirement in required([*content["project"]["dependencies"], *asked[extra]]):
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), (extra, requirement)


def test_an_extra_without_digests_is_refused_and_the_known_ones_are_named() -> None:
    done = printed("trainer", "wandbb")
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith("wandbb: expected extras that packages.txt has: bigquery, build, data, ")
    assert [line.partition("==")[0] for line in printed("build").stdout.splitlines()] == ["setuptools"]


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


def script(name: str) -> ModuleType:
    """A program of container/, with the folder that Python would find its modules in."""
    sys.path.insert(0, str(ROOT / "container"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "container"))


@pytest.fixture(scope="module")
def pin_torch() -> ModuleType:
    return script("pin_torch")


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
        assert f"\n{pin_torch.torch_requirement(build, constraints)} --hash" in path.read_text()


def installation(name: str, version: str, digit: str) -> dict[str, Any]:
    hashes = {"sha256": digit * 64}
    return {"metadata": {"name": name, "version": version}, "download_info": {"archive_info": {"hashes": hashes}}}


def test_pins_of_a_build_have_the_digests_of_what_pip_would_install(pin_torch: ModuleType) -> None:
    pins = ["torch===2.13.0", "nvidia-made-up==1.0", "gone==1"]
    report = [installation("nvidia_made_up", "1.0", "b"), installation("torch", "2.13.0", "a")]
    lines = [f"torch===2.13.0 --hash=sha256:{'a' * 64}", f"nvidia-made-up==1.0 --hash=sha256:{'b' * 64}"]
    assert pin_torch.with_digests(pins, report) == (lines, ["gone==1"])


def test_packages_name_every_extra_that_needs_them_and_none_is_of_torchs_build() -> None:
    pin_packages = script("pin_packages")
    one, two = installation("A_b", "1", "a"), installation("torch", "2", "b")
    found = {"wandb": [one], "data": [two, one]}
    left_out = pin_packages.of_torch("# of torch\ntorch===2 --hash=sha256:b\n")
    assert pin_packages.packages(found, left_out) == [f"a-b==1 --hash=sha256:{'a' * 64}  # data wandb"]
    asked = pin_packages.asked(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    assert asked["project"][0].startswith("setuptools") and asked["wandb"] and "dev" not in asked
