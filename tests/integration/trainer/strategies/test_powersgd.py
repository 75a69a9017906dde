"""PowerSGD over two real processes: what it sends, what it keeps, and that a resumed run is the uninterrupted one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drivers.powersgd import MARK, START, STEPS
from tests.support.short_form import only_whole
from tests.support.trainer.equalities import trained_weights
from tests.support.trainer.runs import encode_features, losses, make_run, metrics, run_ranks, summary, train_runs
from vlmpipe.trainer.config.job import JobConfig


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _found("--folder", str(tmp_path_factory.mktemp("powersgd")), processes=2)


def _found(*arguments: str, processes: int) -> dict[str, Any]:
    said = run_ranks("tests.support.drivers.powersgd", [*arguments], processes=processes)
    line = next(line for line in said.splitlines() if line.startswith(MARK))
    return dict(json.loads(line.removeprefix(MARK)))


def test_gradients_before_the_first_compressed_step_are_those_of_plain_ddp(found: dict[str, Any]) -> None:
    assert found["approximation"]["before"] < 1e-6


def test_gradients_of_several_buckets_are_matrices_of_low_rank_from_then_on(found: dict[str, Any]) -> None:
    said = found["approximation"]
    assert len(said["sizes"]) > 1
    assert said["rank"] == [2, 320]
    assert all(0.1 < apart < 2 for apart in said["after"]) and len(said["after"]) == STEPS - START


def test_vectors_travel_as_they_are(found: dict[str, Any]) -> None:
    assert found["approximation"]["vectors"] < 1e-5


def test_what_is_left_out_is_what_the_ranks_hold_as_errors(found: dict[str, Any]) -> None:
    """The sum of all that was given, with the mean of the ranks' errors, is the sum of the gradients."""
    said = found["approximation"]
    assert said["left out"] > 0.1
    assert said["with errors"] < 1e-5


def test_weights_stay_the_same_on_all_ranks(found: dict[str, Any]) -> None:
    assert found["resumed"]["equal"]


@pytest.mark.parametrize("stop", [START - 1, START + 2])
def test_a_resumed_run_has_every_gradient_of_the_uninterrupted_one(stop: int, found: dict[str, Any]) -> None:
    """Although DDP lays out its buckets anew after the first step of each start."""
    same = found["resumed"][f"from {stop}"]
    assert len(same) == STEPS - stop and all(same)


@only_whole
def test_over_three_ranks_it_has_them_where_buckets_stay_as_they_are(tmp_path: Path) -> None:
    """With train.deterministic. Sums over two have no order that could differ."""
    said = _found("--folder", str(tmp_path), "--deterministic", processes=3)["resumed"]
    assert said["equal"] and all(all(same) for name, same in said.items() if name != "equal")


def test_a_matrix_whose_gradient_was_zeros_learns_again(found: dict[str, Any]) -> None:
    norms = found["zeros"]["norms"]
    assert norms[: START + 2] == [0.0] * (START + 2)
    assert all(norm > 1 and math.isfinite(norm) for norm in norms[START + 2 :])


START_STEP, STOP_STEP = 3, 6
POWERSGD = {"train.gradient_compression": "powersgd", "train.epochs": 6}


def powersgd(rank: int, **more: Any) -> dict[str, Any]:
    return POWERSGD | {"train.powersgd": {"rank": rank, "start_step": START_STEP}} | more


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("powersgd-runs")
    encode_features(make_run(root, "features"))
    return root


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, JobConfig]:
    """Real runs with accumulation, clipping and a frozen tower."""
    changes: dict[str, dict[str, Any]] = {
        "plain": {"train.epochs": 6},
        "rank 1": powersgd(1),
        "rank 7": powersgd(7),
        "rank 32": powersgd(32),  # with which no factors are less than half of a matrix
    }
    jobs = {name: make_run(root, name.replace(" ", "-"), change) for name, change in changes.items()}
    stopped = make_run(root, "stopped", powersgd(1) | {"train.max_steps": STOP_STEP})
    train_runs([*jobs.values(), stopped], processes=2)
    jobs["resumed"] = make_run(root, "stopped", powersgd(1))
    train_runs([jobs["resumed"]], processes=2)
    return jobs


@only_whole
def test_losses_are_plain_ddp_s_until_the_first_compressed_step_and_fall_after_it(runs: dict[str, JobConfig]) -> None:
    plain, low = losses(runs["plain"]), losses(runs["rank 1"])
    assert low[: START_STEP + 1] == pytest.approx(plain[: START_STEP + 1], rel=1e-5), "the update shows a step later"
    assert low[START_STEP + 1] != pytest.approx(plain[START_STEP + 1], rel=1e-5)
    assert all(math.isfinite(loss) for loss in low) and len(low) == len(plain) > STOP_STEP
    assert low[-1] < low[START_STEP]


@only_whole
def test_the_higher_the_rank_the_nearer_to_plain_ddp(runs: dict[str, JobConfig]) -> None:
    plain = losses(runs["plain"])
    apart = {
        name: max(abs(loss / other - 1) for loss, other in zip(losses(runs[name]), plain, strict=True))
        for name in ("rank 1", "rank 7", "rank 32")
    }
    print(apart)
    assert apart["rank 32"] < 1e-5 < apart["rank 7"] < apart["rank 1"]


@only_whole
def test_the_norm_that_clips_is_that_of_what_travelled(runs: dict[str, JobConfig]) -> None:
    norms, plain = ([line["grad_norm"] for line in metrics(runs[name])] for name in ("rank 1", "plain"))
    assert norms[:START_STEP] == pytest.approx(plain[:START_STEP], rel=1e-4)
    assert norms[START_STEP] < 0.999 * plain[START_STEP], "a projection of the same gradients"


@only_whole
def test_a_resumed_run_repeats_every_loss_and_weight(runs: dict[str, JobConfig]) -> None:
    straight, resumed = runs["rank 1"], runs["resumed"]
    assert summary(resumed)["resumed_from_step"] == STOP_STEP > START_STEP
    assert losses(resumed) == losses(straight)
    weights, expected = trained_weights(resumed), trained_weights(straight)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@only_whole
@pytest.mark.parametrize("processes", [1, 4])
def test_a_run_goes_on_with_another_number_of_processes(processes: int, root: Path, runs: dict[str, JobConfig]) -> None:
    name = f"moved-{processes}"
    train_runs([make_run(root, name, powersgd(1) | {"train.max_steps": STOP_STEP})], processes=2)
    job = make_run(root, name, powersgd(1) | ({"train.micro_batch_size": 1} if processes == 4 else {}))
    said = run_ranks(
        "tests.support.drivers.train_many", ["--configs", f"{job.run.run_uri}/run.json"], processes=processes
    )
    assert ("the checkpoint's PowerSGD errors are dropped" in said) == (processes == 1)
    expected = losses(runs["rank 1"])
    assert (summary(job)["resumed_from_step"], summary(job)["world_size"]) == (STOP_STEP, processes)
    assert losses(job)[: STOP_STEP + 1] == pytest.approx(expected[: STOP_STEP + 1], rel=1e-5)
    assert all(math.isfinite(loss) for loss in losses(job)) and losses(job)[-1] < losses(job)[START_STEP]
