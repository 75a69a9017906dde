"""What compares runs refuses wrong gradients that equal losses and equal weights hide, and passes rounding errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.equalities import RELATIVE, trained_weights
from tests.support.trainer.numeric_equality import (
    EVERY_STEP,
    GRADIENT,
    moments_of_steps,
    require_equal_moments,
    require_equal_training,
    require_equal_weights,
    weight_tolerances,
)
from tests.support.trainer.optimizer_state import Moments
from tests.support.trainer.runs import losses, make_run, run_ranks, train_runs
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.optimizer import OptimizerConfig

WRONG = "model.language_model.layers.1.mlp.gate_proj.weight"
# By fault, the strategy that has it. Correct runs are compared by all tests that use this.
FAULTS = chosen(
    {"scaled": "ddp", "not reduced": "ddp", "swapped": "fsdp", "wrong rate": "fsdp"},
    {"scaled", "wrong rate"}.__contains__,
)
CORRECT = ("ddp", "fsdp") if WHOLE else ()
OPTIMIZER = OptimizerConfig(learning_rate=3e-3, eps=1e-5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    root = tmp_path_factory.mktemp("wrong")
    common = {"features.cache": "off", "train.max_steps": 3}

    def job(name: str, strategy: str, **changes: object) -> JobConfig:
        return make_run(root, name.replace(" ", "-"), {**common, "train.strategy": strategy, **changes}, features="off")

    reference = job("reference", "ddp", **{**EVERY_STEP, "train.micro_batch_size": 8})
    train_runs([reference], processes=1)
    of_two = {name: job(name, strategy) for name, strategy in FAULTS.items()}
    of_two |= {f"none {strategy}": job(f"none {strategy}", strategy) for strategy in CORRECT}
    pairs = [word for name, run in of_two.items() for word in (name.split(" ddp")[0].split(" fsdp")[0], run_file(run))]
    run_ranks("tests.support.drivers.train_wrong", [f"model.{WRONG}", *pairs], processes=2)
    return {"reference": reference, **of_two}


def run_file(job: JobConfig) -> str:
    return f"{job.run.run_uri}/run.json"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_correct_runs_are_equal(strategy: str, runs: dict[str, JobConfig]) -> None:
    require_equal_training(runs[f"none {strategy}"], runs["reference"])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_gradient_or_update_is_refused(fault: str, runs: dict[str, JobConfig]) -> None:
    with pytest.raises(AssertionError):
        require_equal_training(runs[fault], runs["reference"])


def test_equal_losses_and_weights_hide_a_wrong_gradient_and_moments_do_not(runs: dict[str, JobConfig]) -> None:
    """AdamW divides it by its own size."""
    job, reference = runs["scaled"], runs["reference"]
    assert losses(job) == pytest.approx(losses(reference), rel=RELATIVE)
    wanted = trained_weights(reference)[WRONG]
    assert float((trained_weights(job)[WRONG] - wanted).abs().max()) < 1e-4, "a thirtieth of one update"
    with pytest.raises(AssertionError, match=r"gate_proj\.weight: first moment differs by 1\.0e-02"):
        require_equal_moments(moments_of_steps(job)[-1], moments_of_steps(reference)[-1])


def test_equal_losses_hide_a_wrong_rate_and_weights_do_not(runs: dict[str, JobConfig]) -> None:
    job, reference = runs["wrong rate"], runs["reference"]
    assert losses(job) == pytest.approx(losses(reference), rel=RELATIVE)
    tolerances = weight_tolerances(moments_of_steps(reference), reference.train.optimizer)
    with pytest.raises(AssertionError, match=r"gate_proj\.weight: \d+ of 2048 elements differ by more than"):
        require_equal_weights(trained_weights(job), trained_weights(reference), tolerances)


def test_a_reference_without_its_steps_is_refused(runs: dict[str, JobConfig]) -> None:
    with pytest.raises(AssertionError, match="EVERY_STEP"):
        require_equal_training(runs["reference"], runs["scaled"])


def moments(seed: int = 0, **names: float) -> dict[str, Moments]:
    """Of parameters whose gradients were about as large as these."""
    drawn = torch.Generator().manual_seed(seed)
    firsts = {name: size * torch.randn(16, 8, generator=drawn) for name, size in names.items()}
    return {name: Moments(first, first.square()) for name, first in firsts.items()}


@pytest.mark.parametrize("size", [1.0, 1e-3])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: one * 1.01, "first moment differs by"),
        (lambda one: one.flip(0), "first moment differs by"),
        (lambda one: torch.cat([one[8:], one[:8]]), "first moment differs by"),
        (lambda one: one * torch.tensor([1.0] * 7 + [0.0]), "first moment differs by"),
        (lambda one: one[:8], "first moment of shape"),
    ],
    ids=["scaled", "reversed", "swapped", "a column left out", "cut"],
)
def test_moments_are_compared_with_the_size_of_their_own_parameter(
    change: Callable[[Tensor], Tensor], said: str, size: float
) -> None:
    expected = moments(large=1.0, wrong=size)
    wrong = change(expected["wrong"].first)
    with pytest.raises(AssertionError, match=f"wrong: {said}"):
        require_equal_moments({**expected, "wrong": Moments(wrong, wrong.square())}, expected)
    with pytest.raises(AssertionError, match="wrong: root of the second moment"):
        require_equal_moments({**expected, "wrong": Moments(expected["wrong"].first, wrong.square())}, expected)


def test_moments_may_differ_by_rounding_errors() -> None:
    expected = moments(large=1.0, small=1e-3)
    noise = moments(seed=1, large=GRADIENT / 5, small=1e-3 * GRADIENT / 5)
    require_equal_moments(
        {
            name: Moments(one.first + noise[name].first, (one.second.sqrt() + noise[name].first).square())
            for name, one in expected.items()
        },
        expected,
    )


def test_a_parameter_that_got_no_gradient_to_speak_of_is_named() -> None:
    """An equality of noise would be no law. Biases of keys cannot have any."""
    with pytest.raises(AssertionError, match="idle: its gradients are next to nothing"):
        require_equal_moments(moments(large=1.0, idle=1e-9), moments(large=1.0, idle=1e-9))
    bias = "model.vision_tower.encoder.layers.0.self_attn.k_proj.bias"
    require_equal_moments(moments(large=1.0, **{bias: 1e-12}), moments(large=1.0, **{bias: -1e-12}))


def test_weights_are_tight_where_gradients_were_large_and_free_where_they_were_noise() -> None:
    first = torch.tensor([1.0, 0.1, 1e-9, 0.0])
    steps = [{"w": Moments(first * share, (first * share).square())} for share in (0.1, 0.19)]
    bounds = weight_tolerances(steps, OPTIMIZER)["w"] / OPTIMIZER.learning_rate
    assert float(bounds[0]) < 0.01 < float(bounds[2]), "shares of the two updates"
    assert float(bounds[1]) < 0.1
    assert float(bounds[2]) == 4, "each update with either sign"
    assert float(bounds[3]) == 0, "it got no gradient, so it moves nowhere"


def test_weights_that_got_no_gradient_may_not_move() -> None:
    weights, tolerances = {"w": torch.ones(2)}, {"w": torch.tensor([0.0, 1e-3])}
    require_equal_weights({"w": torch.tensor([1.0, 1.0005])}, weights, tolerances)
    with pytest.raises(AssertionError, match="w: 1 of 2 elements differ"):
        require_equal_weights({"w": torch.tensor([1.0005, 1.0])}, weights, tolerances)
