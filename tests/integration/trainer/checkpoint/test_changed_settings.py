"""A run that resumes with other settings trains by those of its run file, whatever the strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.equalities import RELATIVE
from tests.support.trainer.numeric_equality import NORM
from tests.support.trainer.runs import losses, make_run, metrics, summary, train_runs
from vlmpipe.trainer.checkpoint.resume_rules import RULES
from vlmpipe.trainer.config.job import JobConfig

STOP_STEP = 2
STEPS = {} if WHOLE else {"train.max_steps": STOP_STEP + 3}
# So different that each alone shows in the losses, see below.
CHANGES: dict[str, Any] = {
    "train.optimizer.learning_rate": 1e-2,
    "train.optimizer.projector_learning_rate": 1e-1,
    # Which it had none of: ZeRO cuts its state by groups of parameters. So large that decay turns signs of weights, for
    # the tiny model's losses say little of its pictures.
    "train.optimizer.tower_learning_rate": 0.8,
    "train.optimizer.batch_scaling": "sqrt",
    "train.optimizer.reference_batch_size": 4,
    "train.optimizer.weight_decay": 5.0,
    "train.optimizer.betas": [0.5, 0.6],
    "train.optimizer.eps": 1e-2,
    "train.clip_grad_norm": 0.05,
    "train.lr_schedule": "linear",
}
STRATEGIES = ("zero1", "zero2", "zero3", "fsdp")
# A rounding error at the border of two bf16 numbers moves a weight by a whole step of them: under AVX2 kernels and
# added rounding errors losses were 1.7e-5 apart. Ten times what fp32 runs are allowed is still a tenth of what the
# least of the changes makes.
PRECISIONS = {"fp32": 1, "bf16": 10}
CASES = {f"{name}-{precision}": (name, precision) for name in STRATEGIES for precision in PRECISIONS}
# Stage 1 with bf16 weights is an optimizer of its own; without them it is that of stage 2.
SHORT = ("zero1-bf16",)
Runs = dict[str, JobConfig]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Of each strategy a run that was stopped and resumed with the changes; of ddp one for each precision."""
    root = tmp_path_factory.mktemp("changed")
    cases = chosen(CASES, lambda name: name in SHORT)
    strategies = {f"ddp-{precision}": ("ddp", precision) for _, precision in cases.values()} | cases
    return _resumed(root, {name: _settings(*case) for name, case in strategies.items()}, CHANGES)


def _settings(strategy: str, precision: str) -> dict[str, Any]:
    return {"train.strategy": strategy, "train.precision": precision, "train.micro_batch_size": 8, "model.freeze": []}


def _resumed(root: Path, settings: dict[str, dict[str, Any]], changes: dict[str, Any]) -> Runs:
    stopped = {"train.max_steps": STOP_STEP}
    train_runs([_online(root, name, own | stopped) for name, own in settings.items()], processes=1)
    jobs = {name: _online(root, name, own | STEPS | changes) for name, own in settings.items()}
    train_runs(list(jobs.values()), processes=1)
    return jobs


def _online(root: Path, name: str, changes: dict[str, Any]) -> JobConfig:
    return make_run(root, name, changes, features="off")


@pytest.mark.parametrize("case", chosen(CASES, lambda name: name in SHORT))
def test_every_strategy_takes_rates_decay_betas_and_clip_of_the_run_file(case: str, runs: Runs) -> None:
    precision = CASES[case][1]
    job, reference, times = runs[case], runs[f"ddp-{precision}"], PRECISIONS[precision]
    assert summary(job)["resumed_from_step"] == STOP_STEP < len(losses(job)) - 2
    assert losses(job) == pytest.approx(losses(reference), rel=times * RELATIVE)
    for name, relative in (("grad_norm", times * NORM), ("learning_rate", 1e-9)):
        found, expected = ([line[name] for line in metrics(each)] for each in (job, reference))
        assert found == pytest.approx(expected, rel=relative)


def test_every_setting_of_an_update_is_among_the_changes() -> None:
    (rule,) = (rule for rule in RULES if "train.optimizer.learning_rate" in rule.fields)
    elsewhere = {
        "train.optimizer.name": "tests/integration/trainer/strategies/test_adamw_8bit.py",
        "train.dpo_beta": "no strategy sees it: the loss is made of it",
        "train.simpo_beta": "as dpo_beta",
        "train.simpo_gamma": "as dpo_beta",
    }
    assert set(rule.fields) <= CHANGES.keys() | elsewhere.keys()


@pytest.mark.slow
@pytest.mark.parametrize("field", sorted(CHANGES.keys() - {"train.optimizer.reference_batch_size"}))
def test_each_of_these_changes_alone_shows_in_the_losses(field: str, runs: Runs, tmp_path: Path) -> None:
    """Otherwise the test above could not fail."""
    without_too = {"train.optimizer.batch_scaling": "train.optimizer.reference_batch_size"}.get(field)
    changes = {name: value for name, value in CHANGES.items() if name not in (field, without_too)}
    (without,) = _resumed(tmp_path, {"ddp": _settings("ddp", "fp32")}, changes).values()
    apart = [abs(one - other) / other for one, other in zip(losses(without), losses(runs["ddp-fp32"]), strict=True)]
    assert max(apart) > 100 * RELATIVE
