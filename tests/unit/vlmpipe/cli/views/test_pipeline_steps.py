"""The table of a pipeline's steps: the decision in its first line, and 80 columns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.support.paths import ROOT
from vlmpipe.cli.views.pipeline_steps import pipeline_steps
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.planner.steps.estimate import Stage, plan_steps

HOURS = {"cache_features": 1.0, "train": 5.0, "evaluate": 0.5}


def printed(config: RunConfig, disks: dict[str, int] | None = None) -> list[str]:
    plan = plan_steps(config, Stage(disks=disks), shape=None, samples=739_220, job_hours=HOURS)  # type: ignore[arg-type]
    screen = Console(file=io.StringIO(), width=80, highlight=False)
    for block in pipeline_steps(plan.as_dict()):
        screen.print(block, width=80)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().splitlines()


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_run_file(ROOT / "configs/llava-7b.yaml")


def test_a_step_is_one_line_that_says_what_it_needs_of_what_is_there(config: RunConfig) -> None:
    lines = printed(config)
    assert all(len(line) <= 80 for line in lines)
    (row,) = [line for line in lines if line.startswith("prepare-data")]
    assert row.split()[:4] == ["prepare-data", "e2-standard-16", "58/87", "13/41"]
    train = lines[next(place for place, line in enumerate(lines) if line.startswith("train ")) + 1]
    assert train.split()[:3] == ["its", "job", "a2-ultragpu-8g"]


def test_what_is_not_known_is_named_in_the_first_lines(config: RunConfig) -> None:
    first = " ".join(" ".join(printed(config)[:3]).split())
    assert "disks and memory suffice, as far as known: not of" in first
    assert "sync-checkpoint" in first


def test_a_disk_that_is_too_small_is_said_first(config: RunConfig) -> None:
    many = load_run_file(ROOT / "configs/llava-7b.yaml", ["plan.sample_images=4"])
    assert "; a disk or memory is too small" in " ".join(line.strip() for line in printed(many, disks={})[:2])
    row = next(line for line in printed(many) if line.startswith("prepare-data"))
    assert row.split()[2].endswith("/287"), "a larger disk is planned, less system and image"
