"""Training with shared prefixes: steps equal those of separate samples, or pairs, under every strategy and setting,
also resumed.

The reference is one process that computes images for each sample. Its steps hold the whole split, as do those with
shared prefixes, so losses, gradient norms, moments of gradients and weights must be the same whatever sequences hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.equalities import begin_in_the_middle
from tests.support.trainer.numeric_equality import EVERY_STEP, require_equal_training
from tests.support.trainer.runs import encode_features, losses, make_run, summary, train_runs
from tests.support.trainer.shared_prefixes import write_pairs, write_questions
from tests.support.trainer.tiny_native import TILES, model_section
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.features.preferences.references import references_of_run

RELATIVE, STOP_STEP = 1e-5, 2
SHARED = {"data.share_prefix": "on"}
# What separate samples are trained with in one process; a run with shared prefixes has the same and its own settings.
REFERENCES: dict[str, dict[str, Any]] = {
    "cached": {},
    "tower": {"model.freeze": [], "features.cache": "off"},
    "lora": {"model.lora": {"rank": 4}},
    "nf4": {"model.lora": {"rank": 4, "quantize_base": "nf4"}},
    "ema": {"train.ema_decay": 0.6},
    "frozen": {"model.freeze": ["tower", "language_model"]},
    "pairs": {"train.objective": "dpo", "train.dpo_beta": 0.5, "features.cache": "off"},
    # Positions of three axes and a level of DeepStack; images that are cut into tiles.
    "qwen3_vl": {"model": model_section("qwen3_vl", freeze=[]), "features.cache": "off"},
    "smolvlm": {"model": model_section(f"smolvlm{TILES}"), "features.cache": "off"},
}


class Case(NamedTuple):
    """A run with shared prefixes: its settings, and the reference that it must equal."""

    changes: dict[str, Any]
    reference: str = "cached"
    nodes: int = 1  # with two processes each


def of(strategy: str, reference: str = "cached", *, nodes: int = 1, **changes: Any) -> Case:
    named = {f"train.{name}": value for name, value in changes.items()}
    return Case(strategy_changes(strategy) | named, reference, nodes)


# The short form has one of each way to share a model or its sequences between ranks.
CASES: dict[str, Case] = chosen(
    {
        "ddp": of("ddp"),
        "fsdp": of("fsdp", activation_checkpointing="full"),
        "selective": of("fsdp", activation_checkpointing="selective"),
        "hsdp": of("hsdp", nodes=2),
        "zero1": of("zero1"),
        "zero2": of("zero2"),
        "zero3": of("zero3"),
        "tp": of("tp", sequence_parallel=True),
        "tp plain": of("tp"),
        "pp": of("pp"),
        "tp+pp+dp": of("tp+pp+dp", nodes=2),
        "context": of("fsdp", context_parallel=2),
        "context ddp": of("ddp", context_parallel=2, activation_checkpointing="full"),
        "context zero3": of("zero3", context_parallel=2),
        "tower": of("ddp", "tower"),
        "tower fsdp": of("fsdp", "tower"),
        "tower context": of("fsdp", "tower", context_parallel=2),
        "tower pp": of("pp", "tower"),
        "lora": of("ddp", "lora"),
        "lora fsdp": of("fsdp", "lora"),
        "nf4": of("fsdp", "nf4"),
        "ema": of("fsdp", "ema"),
        "frozen": of("fsdp", "frozen"),
        "compiled": of("fsdp", compile="on", compile_backend="aot_eager"),
        **{
            f"{family} {name}": of(strategy, family, **changes)
            for family in ("qwen3_vl", "smolvlm")
            for name, strategy, changes in (
                ("fsdp", "fsdp", {}),
                ("tp", "tp", {"sequence_parallel": True}),
                ("pp", "pp", {}),
                ("context", "ddp", {"context_parallel": 2}),
            )
        },
        "pairs": of("fsdp", "pairs"),
        "pairs ddp": of("ddp", "pairs"),
        "pairs zero3": of("zero3", "pairs"),
        "compiled ddp": of("ddp", compile="on", compile_backend="aot_eager", activation_checkpointing="selective"),
    },
    lambda name: name in ("tp", "pp", "context", "pairs"),  # of which the last is fsdp
)
USED = dict.fromkeys(case.reference for case in CASES.values())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Where runs are, and their data by objective, with cached features of the first."""
    root = tmp_path_factory.mktemp("runs")
    more = {"validation_fraction": 0.3, "max_images_per_sequence": 8}
    questions, pairs = write_questions(root / "data") | more, write_pairs(root / "pairs") | more
    encode_features(make_run(root, "features", {"data": questions} | SHARED))
    return {"root": root, "sft": questions, "dpo": pairs}


def run(data: dict[str, Any], name: str, changes: dict[str, Any]) -> JobConfig:
    """Steps hold the whole split where `changes` do not say otherwise."""
    whole = {"train.global_batch_size": 32, "train.micro_batch_size": 2, "train.max_steps": 2}
    settings = {"data": data[changes.get("train.objective", "sft")]} | whole | changes
    return make_run(data["root"], name, settings, features=changes.get("features.cache", "reuse"))


@pytest.fixture(scope="module")
def references(data: dict[str, Any]) -> Mapping[str, JobConfig]:
    """Separate samples in one process."""
    jobs = {name: run(data, f"separate-{name}", REFERENCES[name] | EVERY_STEP) for name in USED}
    train_runs(list(jobs.values()), processes=1)
    return jobs


@pytest.fixture(scope="module")
def shared(data: dict[str, Any]) -> Mapping[str, JobConfig]:
    """All cases, those of as many nodes in one process group, which is what takes the time."""
    jobs = {
        name: run(data, f"shared-{number}", REFERENCES[case.reference] | case.changes | SHARED)
        for number, (name, case) in enumerate(CASES.items())
    }
    for nodes in sorted({case.nodes for case in CASES.values()}):
        train_runs([jobs[name] for name, case in CASES.items() if case.nodes == nodes], processes=2, nodes=nodes)
    return jobs


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_those_of_separate_samples(
    name: str, shared: Mapping[str, JobConfig], references: Mapping[str, JobConfig]
) -> None:
    found, separate = shared[name], references[CASES[name].reference]
    require_equal_training(found, separate)
    assert 0 < summary(found)["tokens"] < 0.8 * summary(separate)["tokens"]


def test_pairs_have_the_references_of_separate_ones(
    shared: Mapping[str, JobConfig], references: Mapping[str, JobConfig]
) -> None:
    """Log probabilities that the training job computes before its first step."""
    for split in ("train", "eval"):
        found, expected = (references_of_run(jobs["pairs"].run.run_uri, split) for jobs in (shared, references))
        assert found == pytest.approx(expected, rel=RELATIVE)


def test_resumed_equals_uninterrupted_also_on_other_ranks(data: dict[str, Any]) -> None:
    """With steps of two sequences, of questions and of pairs."""
    small = SHARED | {"train.global_batch_size": 2, "train.micro_batch_size": 1, "train.max_steps": 4}
    kinds = {name: small | REFERENCES[name] for name in (("cached", "pairs") if WHOLE else ("cached",))}
    middle = {"train.checkpoint_every_steps": STOP_STEP}
    straight = {name: run(data, f"straight-{name}", changes | middle) for name, changes in kinds.items()}
    train_runs([*straight.values()], processes=1)
    resumed = {name: run(data, f"resumed-{name}", changes) for name, changes in kinds.items()}
    moved = run(data, "moved", kinds["cached"] | {"train.strategy": "fsdp"})
    for name, job in resumed.items():
        begin_in_the_middle(job, straight[name], STOP_STEP)
    begin_in_the_middle(moved, straight["cached"], STOP_STEP)
    train_runs([*resumed.values()], processes=1)
    train_runs([moved], processes=2)
    assert {summary(job)["resumed_from_step"] for job in (*resumed.values(), moved)} == {STOP_STEP}
    for name, job in resumed.items():
        assert losses(job) == losses(straight[name]) and len(set(losses(job))) > STOP_STEP
    assert losses(moved) == pytest.approx(losses(straight["cached"]), rel=RELATIVE)
