"""The recipes of the container images, read as text: what `make image-test` builds and runs."""

from __future__ import annotations

import re
import shlex
import subprocess
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
    assert all("--mount=type=secret,id=pip " in steps[i] for i in installs)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_installs_only_files_whose_digests_it_knows(name: str) -> None:
    text = (ROOT / f"container/{name}.Dockerfile").read_text().replace("\\\n", " ")
    text = "\n".join(line for line in text.splitlines() if '"$HOROVOD" = 1' not in line)  # an option, built from source
    installs = re.findall(r"pip install [^&;]*", text)
    assert len(installs) == 5
    (of_the_code,) = (call for call in installs if "--no-index" in call)
    assert all("--require-hashes --" in call and "--no-deps" in call for call in installs if call != of_the_code)


def test_the_base_is_named_by_its_digest() -> None:
    assert re.fullmatch(r"python:3\.11-slim@sha256:[0-9a-f]{64}", arguments("trainer")["BASE_IMAGE"])
    assert arguments("pipeline")["BASE_IMAGE"] == arguments("trainer")["BASE_IMAGE"]


def test_apt_takes_googles_packages_by_the_fingerprints_of_its_keys() -> None:
    text = (ROOT / "container/trainer.Dockerfile").read_text()
    assert re.fullmatch(r"[0-9A-F]{40}(,[0-9A-F]{40})*", arguments("trainer")["GOOGLE_KEYS"])
    assert 'echo "deb [signed-by=$GOOGLE_KEYS] $GOOGLE_PACKAGES' in text


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
        assert {argument for argument, _ in unset} <= {"GOOGLE_KEYS", "GOOGLE_PACKAGES"}


def test_the_trainer_image_is_not_roots_and_has_a_place_for_extensions() -> None:
    last_lines = (ROOT / "container/trainer.Dockerfile").read_text().splitlines()[-6:]
    assert "USER 1000" in last_lines
    assert any(line.startswith("ENV TORCH_EXTENSIONS_DIR=/home/vlmpipe/") for line in last_lines)


def calls(recipe: str, folder: Path, *, index: str) -> list[str]:
    """What the step of a recipe that installs torch calls pip with, in a shell with stand-ins for its programs."""
    text = (ROOT / f"container/{recipe}.Dockerfile").read_text().replace("\\\n", " ")
    (step,) = (line for line in text.splitlines() if line.startswith("RUN") and "torch_index" in line)
    command = re.sub(r"^RUN( --mount=\S+)*", "", step).replace("/run/secrets", str(folder))
    command = command.replace("/opt/lmms-eval/bin/", "")
    (folder / "bin").mkdir()
    for program, answer in {"pip": f'echo "$@" >> {folder}/calls', "python": ":", "rm": ":"}.items():
        stand_in = folder / "bin" / program
        stand_in.write_text(f"#!/bin/sh\n{answer}\n")
        stand_in.chmod(0o755)
    (folder / "torch_builds").mkdir()
    (folder / "torch_builds/cu126.txt").write_text(
        "# of torch\ntorch==2+cu126 --hash=sha256:1\ntriton==3 --hash=sha256:2\n"
    )
    if index:
        (folder / "torch_index").write_text(index)
    environment = {"PATH": f"{folder}/bin:/usr/bin:/bin", "TORCH_BUILD": "cu126", "EXTRAS": ""}
    subprocess.run(["sh", "-euc", command], cwd=folder, env=environment, check=True)
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("recipe", NAMES)
def test_an_index_given_as_a_secret_gives_torch_and_nothing_else(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    index = "https://user:secret@index.example/cu126"
    found, usual = (
        calls(recipe, tmp_path / name, index=address) for name, address in [("with", index), ("without", "")]
    )
    only_torch = f"install --no-deps --require-hashes --index-url {index} --requirement torch.txt"
    assert [call for call in found if call not in usual] == [only_torch]
    assert [call for call in found if call != only_torch] == usual
    rest = "--requirement torch_builds/cu126.txt --requirement requirements.txt"
    assert [call.endswith(rest) for call in usual] == [False, True, False], "what it is built with, packages, pip check"
    assert usual[-1] == "check" and found.index(only_torch) < len(usual) - 1
    assert (tmp_path / "with/torch.txt").read_text() == "torch==2+cu126 --hash=sha256:1\n"


def test_lmms_evals_environment_takes_torch_from_the_index_and_nothing_else(tmp_path: Path) -> None:
    index = "https://user:secret@index.example/cu126"
    only_torch, rest = calls("lmms-eval", tmp_path, index=index)[1:]
    assert only_torch == f"install --no-deps --index-url {index} --constraint torch.txt torch"
    assert rest == "install --constraint torch.txt --requirement lmms-eval.txt"
    kept = (tmp_path / "torch.txt").read_text()
    assert "torch==2+cu126\ntriton==3\n" in kept and "--hash" not in kept, "pip takes no digests in constraints"
