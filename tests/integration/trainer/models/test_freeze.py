"""Parameters that are chosen by pattern: every strategy trains them, and only them, as one process does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.support.short_form import chosen
from tests.support.trainer.adapters import built_model
from tests.support.trainer.equalities import RELATIVE, RELATIVE_BF16, trained_weights
from tests.support.trainer.numeric_equality import EVERY_STEP, require_equal_training
from tests.support.trainer.runs import encode_features, losses, make_run, run_ranks, summary
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.weights_digest import model_sha256

STEPS, STOP_STEP = 5, 3
DEEP = {"model.language_model.config.num_hidden_layers": 4}


@dataclass(frozen=True)
class Choice:
    changes: Mapping[str, Any]
    features: str = "reuse"


CHOICES = {
    # The embedding, a whole layer and half of another; gradients pass through them to the projector.
    "frozen in front": Choice(
        {
            "model.freeze_parameters": [
                "*.embed_tokens.*",
                "*language_model.layers.0.*",
                "*language_model.layers.1.self_attn.*",
                "*language_model.layers.3.mlp.up_proj.*",
            ]
        }
    ),
    # Only what is last: of a pipeline the first stage has nothing to train.
    "trained at the end": Choice(
        {
            "model.freeze": ["tower", "projector", "language_model"],
            "model.train_parameters": ["*language_model.layers.3.*", "*language_model.layers.2.mlp.*", "lm_head.*"],
        }
    ),
    "tower thawed in part": Choice(
        {
            "model.train_parameters": ["*vision_tower*layer_norm*", "*vision_tower*layers.1.mlp.*"],
            "features.cache": "off",
        },
        features="off",
    ),
}
# 2 nodes with 2 processes each, as in test_equalities.py.
NODES = {"hsdp": 2, "tp": 2, "tp+pp+dp": 2}
STRATEGIES = ("ddp", "fsdp", "zero2", "zero1", "zero3", "hsdp", "tp", "pp", "tp+pp+dp")
SHORT = {"fsdp, frozen in front", "fsdp, trained at the end", "fsdp, tower thawed in part"}
CASES = chosen({f"{name}, {choice}": (name, choice) for name in STRATEGIES for choice in CHOICES}, SHORT.__contains__)
RESUMED = chosen({name: name for name in STRATEGIES}, lambda name: name == "fsdp")
IN_BF16 = chosen({choice: choice for choice in CHOICES}, lambda choice: choice == "frozen in front")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    root = tmp_path_factory.mktemp("frozen")
    encode_features(make_run(root, "features"))
    encode_features(make_run(root, "features-bf16", {"train.precision": "bf16"}))  # in which its tower computes

    def run(name: str, choice: str, strategy: str, more: Mapping[str, Any] | None = None) -> JobConfig:
        rows = {"train.micro_batch_size": 8 if strategy == "one" else 2 // NODES.get(strategy, 1)}
        of_strategy = {} if strategy == "one" else strategy_changes(strategy)
        changes = {**DEEP, "train.max_steps": STEPS, **rows, **of_strategy, **CHOICES[choice].changes, **(more or {})}
        return make_run(root, name.replace(" ", "-"), changes, features=CHOICES[choice].features)

    found = {f"one {choice}": run(f"one {choice}", choice, "one", EVERY_STEP) for choice in CHOICES}
    _train(list(found.values()), processes=1)
    straight = {f"{name} {choice}": run(f"{name} {choice}", choice, name) for name, choice in CASES.values()}
    for choice in IN_BF16:
        straight[f"fsdp bf16 {choice}"] = run(f"fsdp bf16 {choice}", choice, "fsdp", {"train.precision": "bf16"})
    first = "frozen in front"
    stopped = {name: run(f"{name} resumed", first, name, {"train.max_steps": STOP_STEP}) for name in RESUMED}
    for nodes in (1, 2):
        jobs = [job for name, job in straight.items() if NODES.get(name.split()[0], 1) == nodes]
        jobs += [job for name, job in stopped.items() if NODES.get(name, 1) == nodes]
        _train(jobs, processes=2, nodes=nodes)
    resumed = {f"{name} resumed": run(f"{name} resumed", first, name) for name in RESUMED}
    for nodes in (1, 2):
        jobs = [job for name, job in resumed.items() if NODES.get(name.split()[0], 1) == nodes]
        _train(jobs, processes=2, nodes=nodes)
    return found | straight | resumed


def _train(jobs: Sequence[JobConfig], *, processes: int, nodes: int = 1) -> None:
    """The driver fails where a frozen weight has changed by a bit."""
    if jobs:
        arguments = ["--configs", *[f"{job.run.run_uri}/run.json" for job in jobs]]
        run_ranks("tests.support.drivers.train_frozen", arguments, processes=processes, nodes=nodes)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "choice"), CASES.values(), ids=CASES)
def test_any_trained_subset_equals_one_process(strategy: str, choice: str, runs: dict[str, JobConfig]) -> None:
    job, reference = (runs[f"{name} {choice}"] for name in (strategy, "one"))
    assert len(losses(reference)) == STEPS and len(set(losses(reference))) == STEPS
    require_equal_training(job, reference)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "choice"), CASES.values(), ids=CASES)
def test_a_checkpoint_holds_the_trained_subset_and_all_of_it_changed(
    strategy: str, choice: str, runs: dict[str, JobConfig]
) -> None:
    job = runs[f"{strategy} {choice}"]
    built, weights = built_model(job), trained_weights(job)
    assert weights.keys() == {name for name, weight in built.named_parameters() if weight.requires_grad}
    assert 0 < len(weights) < len(list(built.parameters()))
    assert not any(built.get_parameter(name).equal(weight) for name, weight in weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", RESUMED)
def test_resumed_equals_uninterrupted_bit_for_bit(strategy: str, runs: dict[str, JobConfig]) -> None:
    resumed, straight = runs[f"{strategy} resumed"], runs[f"{strategy} frozen in front"]
    assert summary(resumed)["resumed_from_step"] == STOP_STEP
    assert losses(resumed) == losses(straight)


@pytest.mark.slow
@pytest.mark.parametrize("choice", IN_BF16)
def test_fsdp_computes_a_partly_frozen_layer_in_one_dtype(choice: str, runs: dict[str, JobConfig]) -> None:
    """What FSDP does not slice it does not cast: a product of both types would fail, or run in fp32."""
    found, plain = (losses(runs[f"{name} {choice}"]) for name in ("fsdp bf16", "fsdp"))
    assert found == pytest.approx(plain, rel=RELATIVE_BF16)
    assert found != pytest.approx(plain, rel=RELATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
def test_frozen_weights_are_exported_unchanged(choice: str, runs: dict[str, JobConfig]) -> None:
    job = runs[f"fsdp {choice}"]
    sync_run(job)
    exported = AutoModelForImageTextToText.from_pretrained(Path(job.run.run_uri, "export"), dtype=torch.float32)
    trained = trained_weights(job)
    for name, weight in built_model(job).named_parameters():
        assert exported.get_parameter(name).equal(trained.get(name, weight)), name


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_patterns(runs: dict[str, JobConfig]) -> None:
    """What is trained is part of the model section, which a checkpoint names."""
    one, other = (model_sha256(runs[f"one {choice}"]) for choice in ("frozen in front", "trained at the end"))
    assert one != other


@pytest.mark.slow
def test_a_partly_trained_tower_is_refused_with_cached_features(runs: dict[str, JobConfig], tmp_path: Path) -> None:
    """Before training, and in words: the tower would not be there."""
    changes = {**CHOICES["tower thawed in part"].changes, "features.cache": "on"}
    job = make_run(tmp_path, "thawed", changes)
    with pytest.raises(AssertionError, match=r"thaws [\d,]+ parameters of the tower(.|\n)*set features.cache to off"):
        _train([job], processes=1)
