"""When FSDP gathers weights, and how many layers ahead: it changes no number."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.short_form import chosen
from tests.support.trainer.equalities import STOP_STEP
from tests.support.trainer.numeric_equality import EVERY_STEP, require_equal_training
from tests.support.trainer.runs import losses, make_run, train_runs
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.strategies import GATHERING
from vlmpipe.trainer.config.train import TrainConfig

# Validation is a forward pass without a backward pass, after which nothing may stay gathered.
COMMON: dict[str, Any] = {
    "model.language_model.config.num_hidden_layers": 4,
    "train.max_steps": 4,
    "train.validate_every_steps": STOP_STEP,
    "train.validation_sequences": 3,
}
KEPT, FREED, AHEAD = (
    {"train.reshard_after_forward": "never"},
    {"train.reshard_after_forward": "always"},
    {"train.prefetch_layers": 3},
)
RUNS: dict[str, dict[str, Any]] = chosen(
    {
        "fsdp kept": strategy_changes("fsdp") | KEPT,
        "fsdp freed": strategy_changes("fsdp") | FREED,
        "fsdp ahead": strategy_changes("fsdp") | AHEAD,
        "fsdp ahead checkpointing": strategy_changes("fsdp") | AHEAD | {"train.activation_checkpointing": "full"},
        "tp kept": strategy_changes("tp") | KEPT,
        "tp ahead": strategy_changes("tp") | AHEAD,
    },
    lambda name: name == "fsdp ahead checkpointing",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    root = tmp_path_factory.mktemp("gathering")
    one = make_run(root, "one", COMMON | EVERY_STEP, features="off")
    jobs = {name: make_run(root, name.replace(" ", "-"), COMMON | more, features="off") for name, more in RUNS.items()}
    train_runs([one], processes=1)
    train_runs([job for name, job in jobs.items() if name.startswith("fsdp")], processes=2)
    if split := [job for name, job in jobs.items() if name.startswith("tp")]:
        train_runs(split, processes=4)
    return jobs | {"one": one}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_equals_that_of_one_process(name: str, runs: dict[str, JobConfig]) -> None:
    assert len(losses(runs[name])) == 4
    require_equal_training(runs[name], runs["one"])


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "pp"])
@pytest.mark.parametrize(("field", "value"), [("reshard_after_forward", "never"), ("prefetch_layers", 2)])
def test_strategies_that_do_not_gather_for_each_pass_are_refused(strategy: str, field: str, value: Any) -> None:
    degrees = {"pipeline_parallel": 2} if strategy == "pp" else {}
    base = {"global_batch_size": 8, "optimizer": {"learning_rate": 1e-3}, "strategy": strategy, **degrees}
    with pytest.raises(ValueError, match=f"{field} {value} does not apply to .* use one of {', '.join(GATHERING)}"):
        TrainConfig.model_validate({**base, field: value})
