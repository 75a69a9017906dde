"""Training in 8-bit floats, emulated on CPUs: close to bf16, and resumable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.short_form import chosen, needs_torchao
from tests.support.trainer.equalities import NODES, STOP_STEP, trained_weights
from tests.support.trainer.runs import losses, make_run, summary, train_runs
from tests.support.trainer.shared_prefixes import write_questions
from tests.support.trainer.tiny_runs import strategy_changes

pytestmark = needs_torchao
MEAN_DIFFERENCE = 0.005  # of losses, about twice what 30 steps of a toy showed against fp32
RECIPES = ("tensorwise", "rowwise")
CASES: dict[str, tuple[str, str, dict[str, Any]]] = chosen(
    {f"{name}, {recipe}": (name, recipe, {}) for name in ("ddp", "fsdp", "hsdp") for recipe in RECIPES}
    | {f"context parallel, {recipe}": ("fsdp", recipe, {"train.context_parallel": 2}) for recipe in RECIPES},
    lambda name: name == "fsdp, tensorwise",
)


@pytest.mark.parametrize("case", CASES)
def test_losses_stay_close_to_bf16_and_resume_exactly(case: str, tmp_path: Path) -> None:
    strategy, recipe, layout = CASES[case]
    nodes = NODES.get(strategy, 1)
    base: dict[str, Any] = strategy_changes(strategy) | {
        "train.precision": "bf16",
        "train.micro_batch_size": 2 // nodes,
        **layout,
    }
    runs = {
        "bf16": base,
        "float8": base | {"train.float8": recipe},
        "resumed": base | {"train.float8": recipe, "train.max_steps": STOP_STEP},
    }
    plain, straight, stopped = (make_run(tmp_path, name, changes, features="off") for name, changes in runs.items())
    train_runs([plain, straight, stopped], processes=2, nodes=nodes)
    resumed = make_run(tmp_path, "resumed", runs["float8"], features="off")
    train_runs([resumed], processes=2, nodes=nodes)
    found, expected = losses(straight), losses(plain)
    differences = [abs(one - other) for one, other in zip(found, expected, strict=True)]
    assert 0 < sum(differences) / len(differences) < MEAN_DIFFERENCE
    assert (summary(straight)["float8"], summary(plain)["float8"]) == (recipe, "none")
    assert summary(resumed)["resumed_from_step"] == STOP_STEP and losses(resumed) == found
    weights, again = trained_weights(straight), trained_weights(resumed)
    assert all(weights[name].equal(again[name]) for name in weights)
    assert {tensor.dtype.itemsize for tensor in weights.values()} == {4}, "checkpoints hold fp32 masters"


@pytest.mark.parametrize("recipe", chosen(dict.fromkeys(RECIPES), lambda name: name == "tensorwise"))
def test_shared_prefixes_have_the_losses_of_separate_samples(recipe: str, tmp_path: Path) -> None:
    """Each step holds the whole split: only roundings of products differ, which are made once for a prefix."""
    data = write_questions(tmp_path / "data") | {"validation_fraction": 0.3, "max_images_per_sequence": 8}
    steps = {"train.global_batch_size": 32, "train.micro_batch_size": 2, "train.max_steps": 4}
    base = strategy_changes("ddp") | steps | {"data": data, "train.precision": "bf16", "train.float8": recipe}
    separate, shared = (
        make_run(tmp_path, f"share-{how}", base | {"data.share_prefix": how}, features="off") for how in ("off", "on")
    )
    train_runs([separate, shared], processes=2)
    assert losses(shared) == pytest.approx(losses(separate), abs=MEAN_DIFFERENCE)
    assert losses(shared)[0] > losses(shared)[-1]
    assert 0 < summary(shared)["tokens"] < 0.8 * summary(separate)["tokens"]
    assert {summary(job)["float8"] for job in (separate, shared)} == {recipe}
