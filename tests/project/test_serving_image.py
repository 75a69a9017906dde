"""The recipe of the serving image: vLLM's own packages stay, its version is the one that was compared, by digest."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT
from vlmpipe.config.vllm import load_vllm

RECIPE = (ROOT / "container/serving.Dockerfile").read_text().replace("\\\n", " ")
ADDED = [
    Requirement(line.partition("#")[0])
    for line in (ROOT / "container/serving.txt").read_text().splitlines()
    if not line.startswith("#")
]
DIGEST = f"vllm/vllm-openai@sha256:{'a' * 64}"


def pins() -> dict[str, str]:
    lines = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


def step(word: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the recipe's step that has this word, with a stand-in for the image's Python and its vLLM 0.32.0+cu130."""
    (line,) = (one for one in RECIPE.splitlines() if one.startswith("RUN") and word in one)
    (folder / "bin").mkdir()
    (folder / "bin/python3").write_text('#!/bin/sh\n[ "$2" = pip ] && echo packages || echo 0.32.0+cu130\n')
    (folder / "bin/python3").chmod(0o755)
    environment = {"PATH": f"{folder}/bin:/usr/bin:/bin", **variables}
    command = line.removeprefix("RUN ")
    return subprocess.run(["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("image", "code"), [(DIGEST, 0), ("vllm/vllm-openai:v0.32.0", 64), ("vllm/vllm-openai", 64)])
def test_vllms_image_is_named_by_its_digest(image: str, code: int, tmp_path: Path) -> None:
    done = step("NAME@sha256", tmp_path, VLLM_IMAGE=image)
    assert done.returncode == code
    assert code == 0 or f"VLLM_IMAGE is {image}, expected" in done.stderr


@pytest.mark.parametrize(("version", "code"), [("0.32.0", 0), ("0.32", 64), ("0.33.0", 64)])
def test_another_version_of_vllm_ends_the_build(version: str, code: int, tmp_path: Path) -> None:
    done = step("$found", tmp_path, VLLM_VERSION=version)
    assert done.returncode == code
    assert code == 0 or "the image has vLLM 0.32.0+cu130" in done.stderr
    assert (tmp_path / "packages.txt").exists() == (code == 0), "the versions that the image holds"


def test_the_version_is_the_one_that_check_knows() -> None:
    assert re.findall(r"^ARG VLLM_VERSION=(\S+)$", RECIPE, re.MULTILINE) == [load_vllm().version]


def test_the_added_packages_are_those_of_the_other_images() -> None:
    known = pins()
    exact = {one.name: str(one.specifier).removeprefix("==") for one in ADDED if str(one.specifier).startswith("==")}
    assert exact.keys() >= {"num2words", "google-cloud-storage", "boto3"}
    assert {name: version for name, version in exact.items() if known.get(name, version) != version} == {}


def test_packages_of_the_image_keep_their_versions() -> None:
    command = [sys.executable, "container/added_constraints.py", "constraints.txt"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in printed}
    here = {canonicalize_name(one.name): one.version for one in distributions()}
    assert here.items() <= found.items(), "what is installed stays"
    assert {name: found[name] for name in pins().keys() - here.keys()} == {
        name: pins()[name] for name in pins().keys() - here.keys()
    }


def test_the_start_program_is_the_entry_point() -> None:
    assert re.findall(r"^ENTRYPOINT (.+)$", RECIPE, re.MULTILINE) == [
        '["python3", "-P", "-m", "vlmpipe.trainer.serving.vllm_server"]'
    ]
