"""What a pipeline's steps hand on must fit into the metadata that Vertex AI keeps of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.pipelines.example_project import load_shipped
from vlmpipe.components.runtime.sweep_steps import ENDED_CHARS
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.sections.sweep import MAX_TRAININGS
from vlmpipe.pipelines import step_metadata
from vlmpipe.pipelines.compile import compile_pipeline
from vlmpipe.pipelines.step_metadata import check_step_metadata
from vlmpipe.platforms.table import platform_of
from vlmpipe.trainer.errors import ConfigError

VERTEX = platform_of("vertex")
MAX_BYTES = VERTEX.max_step_bytes or 0
DIGITS = ROOT / "configs/digits.yaml"
SHIPPED = [*sorted((ROOT / "configs").glob("*.yaml")), *sorted((ROOT / "configs/sweeps").glob("*.yaml"))]


def sweep(trainings: int, per_job: int, bucket: str = "gs://example-bucket/vlmpipe") -> RunConfig:
    rates = ", ".join(f"1.{number:03}e-3" for number in range(trainings // 2))
    values = f"sweep={{grid: {{train.optimizer.learning_rate: [{rates}]}}, starts: 2, trainings_per_job: {per_job}}}"
    return load_shipped(DIGITS, [values, f"gcp.pipeline_root={bucket}", "cluster.replica_count=1"])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_run_files_stay_far_below(path: Path) -> None:
    sizes = [size for _, size, _ in step_metadata._sizes(load_shipped(path), VERTEX)]
    assert max(sizes) < MAX_BYTES / 2


def test_a_sweep_of_too_many_jobs_is_refused_with_what_helps(tmp_path: Path) -> None:
    many = sweep(MAX_TRAININGS, 1)
    with pytest.raises(ConfigError, match=r"step list-jobs take about \d+ KB") as caught:
        compile_pipeline(many, "vertex", tmp_path / "p.yaml")
    assert "sweep.trainings_per_job" in caught.value.text() and not (tmp_path / "p.yaml").exists()


def test_what_helps_helps() -> None:
    check_step_metadata(sweep(MAX_TRAININGS, 8), VERTEX)


def test_a_jobs_sentence_is_as_short_as_the_estimate_takes_it() -> None:
    assert ENDED_CHARS * MAX_TRAININGS <= MAX_BYTES, "compare-variants takes the sentence of every job"
