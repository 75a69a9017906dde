"""Mixers that are no attention, such as gated delta rules, in packed sequences that several processes train on.

That packed samples equal each alone, loss and gradients, is held by test_hf.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf.publish import model_section, publish
from tests.support.short_form import WHOLE
from tests.support.trainer.native_models import write_data
from tests.support.trainer.runs import encode_features, losses, make_run, run_ranks, train_runs
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.models.attention.sample_groups import groups_of_like_lengths

RELATIVE = 1e-5
STEPS = 4 if WHOLE else 2
FROZEN = {"model.freeze": ["tower", "projector"]}
ADAPTERS = {"model.lora": {"rank": 4}}
WAYS: dict[str, dict[str, Any]] = {"zero3": {"train.strategy": "zero3"}}
if WHOLE:
    WAYS |= {
        "ddp": {"train.strategy": "ddp"},
        "fsdp": {"train.strategy": "fsdp"},
        "zero2": {"train.strategy": "zero2"},
        "zero3 checkpointing": {"train.strategy": "zero3", "train.activation_checkpointing": "full"},
        "fsdp checkpointing": {"train.strategy": "fsdp", "train.activation_checkpointing": "full"},
        "fsdp selective": {"train.strategy": "fsdp", "train.activation_checkpointing": "selective"},
        "fsdp adapters": ADAPTERS | {"train.strategy": "fsdp"},
        "zero3 adapters": ADAPTERS | {"train.strategy": "zero3"},
        "fsdp cached": FROZEN | {"train.strategy": "fsdp", "features.cache": "on"},
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, JobConfig]:
    root = tmp_path_factory.mktemp("runs")
    base = {
        "model": model_section(publish("qwen3_5", root / "model")),
        "data": {**write_data(root / "data"), "validation_fraction": 0.3},
        "features.cache": "off", "train.global_batch_size": 4, "train.micro_batch_size": 1, "train.max_steps": STEPS,
        "train.epochs": 4,
    }  # fmt: skip
    alone = base | {"train.strategy": "ddp", "train.micro_batch_size": 4}
    kinds: dict[str, dict[str, Any]] = {"plain": {}} | ({"adapters": ADAPTERS, "cached": FROZEN} if WHOLE else {})
    made = {
        f"one process {name}": make_run(root, f"one-{name}", alone | kind, features="off")
        for name, kind in kinds.items()
    }
    train_runs([*made.values()], processes=1)
    for name, changes in WAYS.items():
        is_cached = "cached" in name
        more: dict[str, Any] = {} if is_cached else {"features": "off"}
        made[name] = make_run(root, name.replace(" ", "-"), base | changes, **more)
        if is_cached:
            encode_features(made[name])
    for is_zero in (False, True):
        if several := [f"{made[name].run.run_uri}/run.json" for name in WAYS if name.startswith("zero") == is_zero]:
            module = "tests.support.drivers.train_traced"
            run_ranks(module, ["--configs", *several], processes=2, timeout_s=60 * len(several))
    return made


@pytest.mark.parametrize("name", WAYS)
def test_two_processes_equal_one(name: str, runs: Mapping[str, JobConfig]) -> None:
    kind = next((kind for kind in ("adapters", "cached") if kind in name), "plain")
    expected = losses(runs[f"one process {kind}"])
    assert len(set(expected)) == STEPS
    assert losses(runs[name]) == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.parametrize("name", WAYS)
def test_ranks_whose_samples_make_other_rows_ask_for_the_same_collectives(
    name: str, runs: Mapping[str, JobConfig]
) -> None:
    """A mixer is called once for each group of samples of like lengths, and their number differs between ranks."""
    folder = Path(runs[name].run.run_uri, "collectives")
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1))
    rows = [[len(rows_of(batch)) for step in steps for batch in step["bounds"]] for steps in (first, second)]
    assert any(one != other for one, other in zip(*rows, strict=True)), "the situation must occur"
    assert [step["collectives"] for step in first] == [step["collectives"] for step in second]


def rows_of(bounds: list[list[int]]) -> Any:
    return groups_of_like_lengths(torch.tensor(bounds), torch.device("cpu"))
