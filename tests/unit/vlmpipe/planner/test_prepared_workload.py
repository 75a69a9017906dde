"""Plans of prepared data: passes of an epoch over each source, and a warm-up that the steps do not hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.runs import make_run
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.pipelines.check import check_run
from vlmpipe.planner.model_architecture import architecture
from vlmpipe.planner.plan import plan_run
from vlmpipe.planner.prepared_workload import planned_workload
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.data.prepare.fingerprint import find_prepared
from vlmpipe.trainer.data.prepare.pipeline import prepare
from vlmpipe.trainer.data.shards.prepared_files import DONE, Manifest, OtherFormatError
from vlmpipe.trainer.errors import ConfigError, DataError
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.setup.data import open_data
from vlmpipe.trainer.storage import open_storage

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
    uri = find_prepared(job)
    passes = float(note.rstrip(".").rpartition(" ")[2])
    assert passes == pytest.approx(workload.samples / 2 / (counts["train"] - workload.samples / 2), abs=0.1)
    with pytest.raises(DataError, match="an epoch reads few"):
        planned_workload(run_file(max_source_passes=passes / 2), model, paths)
    manifest = Manifest.read(open_storage(uri))
    Path(uri, DONE).write_bytes(replace(manifest, format=13).to_bytes())
    with pytest.raises(OtherFormatError, match=f"vlmpipe data convert {uri}"):  # as the run would be
        planned_workload(config, model, paths)


def test_a_warmup_of_more_steps_than_the_data_give_is_refused_by_the_plan_and_by_training(tmp_path: Path) -> None:
    def run(**train: Any) -> RunConfig:
        changes = {"train.warmup_fraction": None, "train.warmup_steps": 7, "output.root_uri": str(tmp_path)}
        return parse_run_config(merged(TINY, changes | {f"train.{name}": each for name, each in train.items()}), "t")

    config = run()
    planned = plan_run(config)
    assert "warmup_steps" not in " ".join(planned.errors + list(planned.notes)), "the number of steps is not known"
    assumed = parse_run_config(merged(config.given(), {"plan.samples": 20, "plan.sample_tokens": 60}), "t")
    assert "7 are more than all 3 steps: use at most 3, or warmup_fraction in its place (the plan" in note_of(assumed)
    job = make_run(tmp_path, "r")
    steps = plan_run(run(warmup_steps=1)).load
    assert steps and steps.steps and steps.is_prepared
    config = run(warmup_steps=steps.steps + 1)
    problem = f"train.warmup_steps {steps.steps + 1} are more than all {steps.steps} steps: use at most {steps.steps}"
    assert any(problem in error for error in plan_run(config).errors)
    assert any(one.state != "ok" and problem in one.text for one in check_run(config))
    with pytest.raises(ConfigError, match=problem.partition(": ")[0]):
        open_data(job.model_copy(update={"train": config.train}))


def note_of(config: RunConfig) -> str:
    (note,) = (note for note in plan_run(config).notes if "warmup_steps" in note)
    return note
