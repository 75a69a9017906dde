"""The recipes' files, without their environments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import load_run_file

RUN_FILES = [path for path in sorted(ROOT.glob("recipes/*/*.yaml")) if path.name != "train.yaml"]


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_recipe_is_a_run_file_with_a_trainer_whose_files_exist(path: Path) -> None:
    trainer = load_run_file(path).train.trainer
    assert trainer and (trainer.name == path.parent.name)
    named = [word for word in trainer.command if word.startswith("recipes/")]
    assert named and all((ROOT / word).is_file() for word in named)


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*/requirements.txt")), ids=lambda path: path.parent.name)
def test_every_requirement_is_an_exact_release_that_no_machine_has_alone(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 10 and all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
