"""The recipes' files, without their environments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT
from vlmpipe.config.run_config import load_run_file
from vlmpipe.job_spec.check import job_violations
from vlmpipe.trainer.config.external_trainer import fill_in
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.external.launch import setting_values

RECORDED = Path(__file__).with_name("recipe_settings.json")  # settings by trainer, read from their sources
IMAGE = "us-docker.pkg.dev/p/v/t@sha256:" + 64 * "0"
RUN_FILES = [path for path in sorted(ROOT.glob("recipes/*/*.yaml")) if path.name != "train.yaml"]


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_recipe_is_a_run_file_with_a_trainer_whose_files_exist(path: Path) -> None:
    config = load_run_file(path)
    trainer = config.train.trainer
    assert trainer and (trainer.name == path.parent.name)
    named = [word for word in (*trainer.command, *trainer.package_uris) if word.startswith("recipes/")]
    assert named and all((ROOT / word).exists() for word in named)
    job = JobConfig.model_validate(config.to_run_json(RunPaths(run_id="one", root_uri="/runs")))
    filled = fill_in(trainer.command, setting_values(job, world_size=2))
    assert not [word for word in filled if "None" in word]


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_recipe_keeps_the_rules_of_job_specs_on_vertex(path: Path) -> None:
    account = "gcp={service_account: trainer@example-project.iam.gserviceaccount.com}"
    trainer = load_run_file(path).train.trainer
    assert trainer
    # An example's image is its own; a run file for this machine has none, and a package runs on Vertex AI's.
    image = [] if trainer.image_uri or trainer.package_uris else [f"train.trainer.image_uri={IMAGE}"]
    config = load_run_file(path, [account, f"cluster.image_uri={IMAGE}", *image])
    assert job_violations(config, "train", "gs://b/run") == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*/requirements.txt")), ids=lambda path: path.parent.name)
def test_every_requirement_is_an_exact_release_that_no_machine_has_alone(path: Path) -> None:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert len(lines) > 10 and all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)


SETTING = re.compile(r"(?:--)?([a-z_.]+)(?:=.*)?")
OWN = {"--data", "--output"}  # of the recipe's train.py
# Given to a class of another package, or to a function by name.
PASSED_ON = ("_target_", "collate_fn", "processor.", "optimizer.")


@pytest.mark.parametrize("name", json.loads(RECORDED.read_text()))
def test_a_recipe_that_no_environment_here_runs_has_only_settings_that_its_trainer_knows(name: str) -> None:
    folder, known = ROOT / "recipes" / name, set(json.loads(RECORDED.read_text())[name]["settings"])
    trainer = load_run_file(folder / "run.yaml").train.trainer
    assert trainer
    words = {word for word in (*trainer.command, *trainer.resume_args) if re.match(r"--|[a-z_]+=", word)} - OWN
    given = {match[1] for word in words if (match := SETTING.fullmatch(word))}
    assert len(given) == len(words) > 10
    given |= set(names_of(yaml.safe_load((folder / "train.yaml").read_text())))
    assert {one for one in given if one not in known and not any(part in one for part in PASSED_ON)} == set()
    assert len(given & known) > 20


def names_of(settings: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Dotted names of the settings, sections included."""
    for name, value in settings.items():
        yield before + name
        if isinstance(value, Mapping):
            yield from names_of(value, f"{before}{name}.")
