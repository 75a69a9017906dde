"""A plan of prepared data says how often an epoch reads each source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.planner.model_architecture import architecture
from vlmpipe.planner.prepared_workload import planned_workload
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.data.prepare.pipeline import prepare
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.progress import Progress

SOURCES = [
    {"name": "digits", "uri": "builtin:digits", "max_samples": 40, "weight": 0.5},
    {"name": "few", "uri": "builtin:digits", "max_samples": 10, "weight": 0.5},
]


def run_file(**data: Any) -> RunConfig:
    changes = {"data.source": "", "data.max_samples": 0, "data.sources": SOURCES, "data.sequence_length": 128}
    return parse_run_config(merged(TINY, changes | {f"data.{name}": value for name, value in data.items()}), "a test")


def test_passes_of_each_source_are_noted_and_bounded(tmp_path: Path) -> None:
    config, paths = run_file(), RunPaths(run_id="run-1", root_uri=str(tmp_path))
    model = architecture(config)
    assert "not known before it is prepared" in planned_workload(config, model, paths)[1]
    job = JobConfig.model_validate(config.to_run_json(paths))
    counts = prepare(job, Progress(job.run.run_uri, "prepare-data", quiet=True)).counts
    workload, note = planned_workload(config, model, paths)
    assert note.startswith("Prepared data, passes an epoch: digits 1, few ") and workload.samples
    passes = float(note.rstrip(".").rpartition(" ")[2])
    assert passes == pytest.approx(workload.samples / 2 / (counts["train"] - workload.samples / 2), abs=0.1)
    with pytest.raises(DataError, match="an epoch reads few"):
        planned_workload(run_file(max_source_passes=passes / 2), model, paths)
