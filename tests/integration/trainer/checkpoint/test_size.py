"""A checkpoint is as large as is said before training, under each engine that writes one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.short_form import chosen
from tests.support.trainer.runs import encode_features, make_run, run_ranks
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.sizing.checkpoint_size import checkpoint_bytes

RANKS = 2
AVERAGED = {"train.ema_decay": 0.9}
# Of a tied head, whose second name is no second matrix, and which is much of the model.
TIED = {
    "model.language_model.config.tie_word_embeddings": True,
    "model.language_model.config.hidden_size": 2048,
    "model.language_model.config.head_dim": 8,
    "model.language_model.config.num_hidden_layers": 1,
    "model.language_model.config.intermediate_size": 64,
}
ADAPTERS = {"model.lora": {"rank": 64, "alpha": 64.0}}
CASES: dict[str, dict[str, Any]] = {}
for strategy in ("ddp", "fsdp", "zero1", "zero2", "zero3"):
    chosen_by = {"train.strategy": strategy}
    CASES |= {strategy: chosen_by, f"{strategy}, averaged": chosen_by | AVERAGED, f"{strategy}, tied": chosen_by | TIED}
    CASES[f"{strategy}, tied and frozen"] = chosen_by | TIED | ADAPTERS
TRIED = chosen(CASES, lambda name: name in ("ddp", "zero2, averaged", "zero3"))
WIDE = {"model.language_model.config.intermediate_size": 4096}  # so that little is beside the tensors' numbers
BESIDE = 700_000  # bytes besides the numbers: descriptions of tensors, random numbers' state


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    """Of one process group."""
    root = tmp_path_factory.mktemp("runs")
    encode_features(make_run(root, "features"))
    once = {"train.checkpoint_every_steps": 2, "train.max_steps": 2}
    made = {
        name: make_run(
            root, name.replace(", ", "-"), (changes if changes.keys() & TIED.keys() else WIDE | changes) | once
        )
        for name, changes in TRIED.items()
    }
    configs = [f"{job.run.run_uri}/run.json" for job in made.values()]
    run_ranks("tests.support.drivers.train_many", ["--configs", *configs], processes=RANKS)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_checkpoint_size_matches_the_estimate(name: str, runs: dict[str, JobConfig]) -> None:
    job = runs[name]
    checkpoints = [file for file in Path(job.run.run_uri, "checkpoints").rglob("*") if file.is_file()]
    found = sum(file.stat().st_size for file in checkpoints)
    trained = json.loads(Path(job.run.run_uri, "summary.json").read_text(encoding="utf-8"))["trainable_parameters"]
    said = checkpoint_bytes(trained, job.train)
    assert said < found < said + BESIDE
