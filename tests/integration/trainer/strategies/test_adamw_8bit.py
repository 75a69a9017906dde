"""8-bit moments under FSDP: two processes as one, exact resumes, and checkpoints of either precision."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.short_form import WHOLE
from tests.support.trainer.runs import losses, make_run, summary, train_runs
from tests.support.trainer.tiny_runs import TINY
from vlmpipe.trainer.config.job import JobConfig

STOP_STEP = 2
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
COMMON = {
    "model.language_model.config": TINY["model"]["language_model"]["config"] | WIDE | {"num_key_value_heads": 2},
    "train.strategy": "fsdp",
    "train.max_steps": 5,
    "train.optimizer.learning_rate": 1e-3,
}
IN_8_BITS = {"train.optimizer.name": "adamw_8bit"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    root = tmp_path_factory.mktemp("adamw-8bit")

    def run(name: str, changes: dict[str, Any]) -> JobConfig:
        return make_run(root, name, {**COMMON, **changes}, features="off")

    stopped = {"train.max_steps": STOP_STEP}
    two = {
        "fp32": run("fp32", {}),
        "8 bits": run("8-bits", IN_8_BITS),
        "resumed": run("resumed", IN_8_BITS | stopped),
    }
    if WHOLE:
        two |= {
            "elastic": run("elastic", IN_8_BITS | stopped),
            "to fp32": run("to-fp32", IN_8_BITS | stopped),
            "from fp32": run("from-fp32", stopped),
        }
    train_runs(list(two.values()), processes=2)
    again = {"resumed": run("resumed", IN_8_BITS)}
    one = {"one process": run("one-process", IN_8_BITS)}
    if WHOLE:
        again |= {"to fp32": run("to-fp32", {}), "from fp32": run("from-fp32", IN_8_BITS)}
        one["elastic"] = run("elastic", IN_8_BITS)
    train_runs(list(again.values()), processes=2)
    train_runs(list(one.values()), processes=1)
    return {**two, **again, **one}


@pytest.mark.slow
def test_two_processes_train_as_one_and_close_to_fp32_moments(runs: dict[str, JobConfig]) -> None:
    found = losses(runs["8 bits"])
    assert found == pytest.approx(losses(runs["one process"]), rel=1e-4)
    assert found != losses(runs["fp32"])
    assert found == pytest.approx(losses(runs["fp32"]), rel=0.02)


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one(runs: dict[str, JobConfig]) -> None:
    assert summary(runs["resumed"])["resumed_from_step"] == STOP_STEP
    assert losses(runs["resumed"]) == losses(runs["8 bits"])


@pytest.mark.slow
def test_on_another_number_of_processes_it_is_equal_as_far_as_sums_of_gradients_are(runs: dict[str, JobConfig]) -> None:
    assert summary(runs["elastic"])["resumed_from_step"] == STOP_STEP
    assert losses(runs["elastic"]) == pytest.approx(losses(runs["8 bits"]), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["to fp32", "from fp32"])
def test_checkpoints_load_into_the_other_precision(name: str, runs: dict[str, JobConfig]) -> None:
    assert summary(runs[name])["resumed_from_step"] == STOP_STEP
    assert losses(runs[name]) == pytest.approx(losses(runs["fp32"]), rel=0.02)
