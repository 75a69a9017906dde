"""Stages with real training: the second one starts with what the first one has learned, on the same data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.runs import metrics, summary, train_runs
from tests.support.trainer.tiny_native import model_section
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.components.runtime.parameters import compiled_settings
from vlmpipe.components.runtime.prepared_data import prepare_run
from vlmpipe.components.runtime.resolve import resolve
from vlmpipe.config.run_config import RunConfig
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.feature_cache.store import features_key
from vlmpipe.trainer.progress import Progress

ALIGNED = 4  # steps of the first stage
# One step, and an average that hardly moves: what is validated is the start.
OF_THE_START = {"max_steps": 1, "validate_every_steps": 1, "ema_decay": 1 - 1e-9}
COMMON = {"features.cache": "off", "data.validation_fraction": 0.2, "train.validation_sequences": 5}
FAMILIES: dict[str, dict[str, Any]] = {"llava": {}, "qwen3_vl": {"model": model_section("qwen3_vl")}}
STAGES = [
    {
        "name": "align",
        "freeze": ["tower", "language_model"],
        "train": {"max_steps": ALIGNED, "validate_every_steps": 1},
    },
    {"name": "finetune", "freeze": ["tower"], "train": OF_THE_START},
]


def begin(config: RunConfig, stage: str) -> JobConfig:
    """What resolve-run and prepare-data do."""
    compiled = compiled_settings(config, "local", config.output.root_uri, stage)
    uri = resolve(json.dumps(config.to_dict()), compiled, run_id="r1").run_uri
    job = JobConfig.load(f"{uri}/run.json")
    prepare_run(job, Progress(uri, "prepare-data", quiet=True))
    return job


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[JobConfig, JobConfig]]:
    """Both stages of a run of each family."""
    configs = {}
    for name, changes in FAMILIES.items():
        content = merged(TINY, COMMON | changes | {"output.root_uri": str(tmp_path_factory.mktemp(name))})
        configs[name] = RunConfig.model_validate(content | {"stages": STAGES})
    found = {}
    for stage in ("align", "finetune"):
        found[stage] = {name: begin(config, stage) for name, config in configs.items()}
        train_runs(list(found[stage].values()), processes=1)
        for job in found[stage].values():
            sync_run(job)
    return {name: (found["align"][name], found["finetune"][name]) for name in configs}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_second_stage_starts_at_the_first_ones_held_out_loss(
    family: str, stages: dict[str, tuple[JobConfig, JobConfig]]
) -> None:
    first, second = stages[family]
    learned = {line["step"]: line["validation_loss"] for line in metrics(first)}
    (start,) = (line["validation_loss"] for line in metrics(second))
    assert start == pytest.approx(learned[ALIGNED], rel=1e-6)
    assert start != pytest.approx(learned[1], rel=1e-4), "the first stage has learned something"
    export = f"{first.run.run_uri}/export"
    assert export in summary(second)["initial_weights"].values()


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_on_the_same_data_share_what_was_prepared(
    family: str, stages: dict[str, tuple[JobConfig, JobConfig]]
) -> None:
    first, second = stages[family]
    assert first.pointers().prepared_uri == second.pointers().prepared_uri
    record = json.loads(Path(second.run.run_uri, "steps/prepare-data.json").read_text(encoding="utf-8"))
    assert record["state"] == "reused"
    first_features, second_features = (features_key(job.model, job.train.precision) for job in (first, second))
    is_shared = first_features == second_features
    assert is_shared == (family == "llava"), "a model as a whole is another one after a stage, by its address"
