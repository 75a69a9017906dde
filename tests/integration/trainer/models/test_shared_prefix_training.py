"""Training with shared prefixes: a step equals that of separate samples or pairs, every strategy one process, resumed
all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.short_form import WHOLE, only_whole
from tests.support.trainer.runs import encode_features, losses, make_run, summary, train_runs
from tests.support.trainer.shared_prefixes import write_pairs, write_questions
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.features.preferences.references import references_of_run

RELATIVE, STOP_STEP = 1e-5, 2
SHARED = {"data.share_prefix": "on"}
TOWER = {"model.freeze": [], "features.cache": "off"}
ADAPTERS = {"model.lora": {"rank": 4}}
FEW: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"train.strategy": "fsdp", "train.activation_checkpointing": "full"},
}
MORE: dict[str, dict[str, Any]] = {
    "selective": {"train.activation_checkpointing": "selective"},
    "tower": TOWER,
    "tower-fsdp": TOWER | {"train.strategy": "fsdp"},
    "lora": ADAPTERS | {"train.strategy": "fsdp"},
    "lora-ddp": ADAPTERS,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, JobConfig]:
    root = tmp_path_factory.mktemp("runs")
    data = write_questions(root / "data") | {"validation_fraction": 0.3, "max_images_per_sequence": 8}
    base = {"data": data, "train.global_batch_size": 2, "train.micro_batch_size": 1, "train.max_steps": 4}
    shared, whole = base | SHARED, {"train.global_batch_size": 64, "train.micro_batch_size": 4, "train.max_steps": 1}
    first = make_run(root, "reference", shared)
    encode_features(first)
    alone = {
        "reference": first,
        "shared": make_run(root, "shared", shared | whole),
        "separate": make_run(root, "separate", base | whole),
    }
    few = {name: make_run(root, name, shared | changes) for name, changes in FEW.items()}
    begun = make_run(root, "resumed", shared | {"train.max_steps": STOP_STEP})
    of_pairs = write_pairs(root / "pairs") | {"max_images_per_sequence": 8}
    pairs = shared | {"data": of_pairs, "train.objective": "dpo", "train.dpo_beta": 0.5, "features.cache": "off"}
    all_pairs = pairs | whole | {"train.max_steps": 3}
    alone |= {
        "pairs": make_run(root, "pairs", pairs, features="off"),
        "pairs-shared": make_run(root, "pairs-shared", all_pairs, features="off"),
        "pairs-separate": make_run(root, "pairs-separate", all_pairs | {"data.share_prefix": "off"}, features="off"),
    }
    begun_pairs = make_run(root, "pairs-resumed", pairs | {"train.max_steps": STOP_STEP}, features="off")
    more: dict[str, JobConfig] = {}
    if WHOLE:
        more = {
            name: make_run(root, name, shared | changes, features="off" if "tower" in name else "reuse")
            for name, changes in MORE.items()
        }
        alone |= {
            "adapted": make_run(root, "adapted", shared | ADAPTERS),
            "trained": make_run(root, "trained", shared | TOWER, features="off"),
        }
        few["pairs-fsdp"] = make_run(root, "pairs-fsdp", pairs | {"train.strategy": "fsdp"}, features="off")
    train_runs([*alone.values(), begun, begun_pairs], processes=1)
    train_runs([*few.values(), *more.values()], processes=2)
    few["resumed"] = make_run(root, "resumed", shared)
    few["pairs-resumed"] = make_run(root, "pairs-resumed", pairs, features="off")
    train_runs([few["resumed"], few["pairs-resumed"]], processes=1)
    return alone | few | more


def test_a_step_of_shared_prefixes_equals_that_of_separate_samples(runs: Mapping[str, JobConfig]) -> None:
    """By the features of a cache, which hold each image once."""
    assert losses(runs["shared"]) == pytest.approx(losses(runs["separate"]), rel=RELATIVE)
    assert 0 < summary(runs["shared"])["tokens"] < 0.7 * summary(runs["separate"])["tokens"]


def test_every_strategy_equals_one_process(runs: Mapping[str, JobConfig]) -> None:
    expected = losses(runs["reference"])
    assert len(set(expected)) == 4
    for name in ("ddp", "fsdp", *(["selective"] if WHOLE else [])):
        assert losses(runs[name]) == pytest.approx(expected, rel=RELATIVE), name


def test_resumed_equals_uninterrupted(runs: Mapping[str, JobConfig]) -> None:
    assert summary(runs["resumed"])["resumed_from_step"] == STOP_STEP
    assert losses(runs["resumed"]) == losses(runs["reference"])


def test_steps_of_pairs_that_share_equal_those_of_separate_ones(runs: Mapping[str, JobConfig]) -> None:
    """The log probabilities under the reference, too, which the training job computes before its first step."""
    shared, separate = runs["pairs-shared"], runs["pairs-separate"]
    assert losses(shared) == pytest.approx(losses(separate), rel=RELATIVE) and len(set(losses(shared))) == 3
    assert 0 < summary(shared)["tokens"] < 0.6 * summary(separate)["tokens"]
    for split in ("train", "eval"):
        found, expected = (references_of_run(job.run.run_uri, split) for job in (shared, separate))
        assert found == pytest.approx(expected, rel=RELATIVE)


def test_resumed_pairs_equal_uninterrupted_ones(runs: Mapping[str, JobConfig]) -> None:
    assert summary(runs["pairs-resumed"])["resumed_from_step"] == STOP_STEP
    assert losses(runs["pairs-resumed"]) == losses(runs["pairs"])
    if WHOLE:
        assert losses(runs["pairs-fsdp"]) == pytest.approx(losses(runs["pairs"]), rel=RELATIVE)


@only_whole
def test_adapters_and_a_trained_tower_equal_one_process(runs: Mapping[str, JobConfig]) -> None:
    for name, reference in {
        "lora": "adapted",
        "lora-ddp": "adapted",
        "tower": "trained",
        "tower-fsdp": "trained",
    }.items():
        assert losses(runs[name]) == pytest.approx(losses(runs[reference]), rel=RELATIVE), name
