"""The recipes of the container images, read as text: what `make image-test` builds and runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT
from vlmpipe.config.sections.cluster import ClusterConfig
from vlmpipe.trainer.distributed.cuda_builds import build_arguments

NAMES = ("trainer", "pipeline")


@pytest.mark.parametrize("name", ["trainer", "pipeline"])
def test_a_recipe_installs_packages_before_it_copies_code(name: str) -> None:
    text = (ROOT / f"container/{name}.Dockerfile").read_text()
    steps = [line for line in text.replace("\\\n", " ").splitlines() if re.match("[A-Z]+ ", line)]
    code = next(i for i, step in enumerate(steps) if step.startswith("COPY pipelines"))
    installs = [i for i, step in enumerate(steps) if "pip install" in step and "--no-index" not in step]
    assert len(installs) == 2
    assert max(installs) < code, "or changed code would install every package again"
    assert all("--mount=type=secret,id=pip " in steps[i] and "--constraint" in steps[i] for i in installs)


def variables(name: str) -> dict[str, str]:
    """Variables that a recipe sets for whoever runs the image."""
    text = (ROOT / f"container/{name}.Dockerfile").read_text().replace("\\\n", " ")
    lines = re.findall(r"^ENV (.*)$", text, re.M)
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line))


def test_the_trainer_image_finds_the_driver_where_vertex_ai_and_gke_mount_it() -> None:
    found = variables("trainer")
    assert found["LD_LIBRARY_PATH"].startswith("/usr/local/nvidia/lib64:/usr/local/nvidia/lib")
    assert "/usr/local/nvidia/bin" in found["PATH"].split(":")
    assert found["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert found["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


def arguments(name: str) -> dict[str, str]:
    """Build arguments of a recipe with their defaults."""
    text = (ROOT / f"container/{name}.Dockerfile").read_text()
    return dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.M))


@pytest.mark.parametrize(("name", "build"), [("trainer", "cu130"), ("pipeline", "cpu")])
def test_a_recipe_without_arguments_labels_the_build_of_torch_that_it_installs(name: str, build: str) -> None:
    assert build_arguments(build).items() <= arguments(name).items()
    assert ClusterConfig().torch_build == arguments("trainer")["TORCH_BUILD"]


def test_cloud_build_takes_the_recipes_defaults_and_gives_every_argument() -> None:
    content = yaml.safe_load((ROOT / "container/cloudbuild.yaml").read_text())
    for step, name in zip(content["steps"], NAMES, strict=True):
        given = dict(re.findall(r"--build-arg=(\w+)=\$\{(\w+)\}", " ".join(step["args"])))
        defaults = {argument: content["substitutions"][value] for argument, value in given.items()}
        unset = arguments(name).items() - defaults.items()
        assert {argument for argument, _ in unset} <= {"GOOGLE_PACKAGES"}


def test_the_trainer_image_is_not_roots_and_has_a_place_for_extensions() -> None:
    last_lines = (ROOT / "container/trainer.Dockerfile").read_text().splitlines()[-6:]
    assert "USER 1000" in last_lines
    assert any(line.startswith("ENV TORCH_EXTENSIONS_DIR=/home/vlmpipe/") for line in last_lines)


def test_requirements_of_an_image_are_those_of_the_project() -> None:
    printed = subprocess.run(
        [sys.executable, "container/requirements.py", "trainer", "data"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = content["project"]["optional-dependencies"]
    own = content["build-system"]["requires"] + content["project"]["dependencies"]
    assert printed == own + extras["trainer"] + extras["data"]


def calls(recipe: str, folder: Path, *, index: str) -> list[str]:
    """What the step of a recipe that installs torch calls pip with, in a shell with stand-ins for its programs."""
    text = (ROOT / f"container/{recipe}.Dockerfile").read_text().replace("\\\n", " ")
    (step,) = (line for line in text.splitlines() if line.startswith("RUN") and "torch_index" in line)
    command = re.sub(r"^RUN( --mount=\S+)*", "", step).replace("/run/secrets", str(folder))
    command = command.replace("/opt/lmms-eval/bin/", "")
    (folder / "bin").mkdir()
    for program, answer in {"pip": f'echo "$@" >> {folder}/calls', "python": "echo requirements", "rm": ":"}.items():
        stand_in = folder / "bin" / program
        stand_in.write_text(f"#!/bin/sh\n{answer}\n")
        stand_in.chmod(0o755)
    if index:
        (folder / "torch_index").write_text(index)
    environment = {"PATH": f"{folder}/bin:/usr/bin:/bin", "TORCH_BUILD": "cu126", "EXTRAS": ""}
    subprocess.run(["sh", "-euc", command], cwd=folder, env=environment, check=True)
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("recipe", [*NAMES, "lmms-eval"])
def test_an_index_given_as_a_secret_gives_torch_and_nothing_else(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    index = "https://user:secret@index.example/cu126"
    found, usual = (
        calls(recipe, tmp_path / name, index=address) for name, address in [("with", index), ("without", "")]
    )
    constraint = "--constraint torch_builds/cu126.txt"
    only_torch = f"install --no-deps --index-url {index} {constraint} torch"
    assert [call for call in found if call not in usual] == [only_torch]
    assert [call for call in found if call != only_torch] == usual
    assert constraint in usual[-1] and found.index(only_torch) < found.index(usual[-1])
