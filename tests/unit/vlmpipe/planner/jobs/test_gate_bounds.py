"""Bounds on gain and forgetting that too few questions can never pass are known before a run."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from tests.support.pipelines.run_files import small
from vlmpipe.pipelines.check import check_run
from vlmpipe.planner.jobs.gate_bounds import bound_doubts
from vlmpipe.planner.plan import plan_run
from vlmpipe.planner.workload import Workload
from vlmpipe.registry.start_checks import start_checks
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.evaluation.significance.paired import paired_counts
from vlmpipe.trainer.records.evaluation import Retention, StartScores

WEIGHTS = {"model__projector": {"weights": "someone/model"}, "model__language_model": {"weights": "someone/model"}}
LOAD = Workload(
    sequences_per_step=4, sequence_length=64, fill=1.0, samples_per_sequence=1.0, sample_pairs_per_sequence=1.0,
    images_per_sequence=1.0, label_tokens_per_sequence=1.0, sequences_per_epoch=None, steps=None, samples=900, epochs=1,
    origin="", is_prepared=True,
)  # fmt: skip


def doubts_of(load: Workload | None = None, **changes: Any) -> list[tuple[bool, str]]:
    return [(doubt.is_certain, doubt.text) for doubt in bound_doubts(small(**WEIGHTS, **changes), load)]


def passes(images: int, per_image: int, *, gained: bool = False, **bounds: float) -> bool:
    """By the gate itself: a model that changed no answer, or gained all of them."""
    groups = [number // per_image for number in range(images * per_image)]
    right, before = [True] * len(groups), [not gained] * len(groups)
    paired = paired_counts(groups, right, before).model_dump()
    start = StartScores(paired=paired, retention=Retention(paired=paired))
    gate = small(gate__min_questions=1, **{f"gate__{name}": value for name, value in bounds.items()}).gate
    return all(check.passed for check in start_checks(start, gate))


def needed(text: str) -> int:
    return int(re.search(r"expected ([\d,]+)", text)[1].replace(",", ""))  # type: ignore[index]


@pytest.mark.parametrize("bound", [0.002, 0.01, 0.05])
def test_the_default_probe_is_too_small_for_a_tight_bound_and_the_number_named_is_the_smallest(bound: float) -> None:
    [(is_certain, text)] = doubts_of(gate__max_forgetting=bound)
    assert is_certain and "no model can pass" in text and "evaluate.retention.max_images" in text
    images, prompts = needed(text), 3
    assert not passes(50, prompts, max_forgetting=bound)
    assert passes(images, prompts, max_forgetting=bound) and not passes(images - 1, prompts, max_forgetting=bound)
    assert not doubts_of(gate__max_forgetting=bound, evaluate__retention={"max_images": images})
    assert doubts_of(gate__max_forgetting=bound, evaluate__retention={"max_images": images - 1})


@pytest.mark.parametrize("images", range(40, 60))
def test_the_bound_that_is_named_passes(images: int) -> None:
    probe = {"max_images": images}
    [(_, text)] = doubts_of(gate__max_forgetting=0.001, evaluate__retention=probe)
    bound = float(re.search(r"a bound of ([\d.]+) or more", text)[1])  # type: ignore[index]
    assert passes(images, 3, max_forgetting=bound) and not passes(images, 3, max_forgetting=bound - 0.0011)
    assert not doubts_of(gate__max_forgetting=bound, evaluate__retention=probe)


def test_a_single_image_shows_no_bound() -> None:
    [(_, text)] = doubts_of(gate__max_forgetting=0.5, evaluate__retention={"max_images": 1})
    assert "bound of" not in text and needed(text) > 1


def test_bounds_that_can_be_passed_and_gates_without_any_are_not_doubted() -> None:
    assert passes(50, 3, max_forgetting=0.06)
    assert not doubts_of(gate__max_forgetting=0.06)
    assert not doubts_of(gate__max_forgetting=0.001, evaluate__retention={"probe": "off"})
    assert not doubts_of() and not doubts_of(gate__min_gain=0.01), "no number of validation samples is known"


def test_a_small_validation_split_bounds_both() -> None:
    load = dataclasses.replace(LOAD, samples=90)
    [(is_certain, text)] = doubts_of(load, gate__max_forgetting=0.2, data__validation_fraction=0.1)
    assert is_certain and "10 images" in text and "validation images" in text
    [(_, assumed)] = doubts_of(
        dataclasses.replace(load, is_prepared=False), gate__max_forgetting=0.2, data__validation_fraction=0.1
    )
    assert "a model equal to its start cannot pass" in assumed


@pytest.mark.parametrize(("images", "bound"), [(4, 0.5), (30, 0.95)])
def test_a_gain_that_not_even_all_answers_show_is_refused(images: int, bound: float) -> None:
    [(is_certain, text)] = doubts_of(gate__min_gain=bound, evaluate__max_samples=images)
    assert is_certain and not passes(images, 1, gained=True, min_gain=bound)
    assert passes(needed(text), 1, gained=True, min_gain=bound)
    assert not passes(needed(text) - 1, 1, gained=True, min_gain=bound)


def test_a_gain_that_only_a_much_larger_one_shows_is_said() -> None:
    [(is_certain, text)] = doubts_of(gate__min_gain=0.02, evaluate__max_samples=20)
    assert not is_certain and "or more passes" in text
    assert not doubts_of(gate__min_gain=0.02, evaluate__max_samples=300)


def test_benchmarks_are_counted_by_the_share_that_the_probe_takes() -> None:
    file = {"name": "pope", "format": "pope", "uri": "gs://b/pope.json", "images": "gs://b/i", "max_questions": 200}
    [(is_certain, text)] = doubts_of(gate__max_forgetting=0.01, evaluate__benchmarks=[file])
    assert not is_certain and text.count("50 questions") and "evaluate.benchmarks" in text
    assert not doubts_of(gate__max_forgetting=0.01, evaluate__benchmarks=[{**file, "max_questions": 0}]), (
        "not known here"
    )


def test_check_and_plan_say_the_same() -> None:
    config = small(**WEIGHTS, gate__max_forgetting=0.05)
    [(_, text)] = doubts_of(gate__max_forgetting=0.05)
    assert text in plan_run(config).errors
    [finding] = [finding for finding in check_run(config) if finding.subject == "gate"]
    assert (finding.state, finding.text, finding.code) == ("failed", text, ExitCode.CONFIG)
    doubted = small(**WEIGHTS, gate__min_gain=0.02, evaluate__max_samples=20)
    [(_, text)] = doubts_of(gate__min_gain=0.02, evaluate__max_samples=20)
    assert f"{text}." in plan_run(doubted).notes and text not in plan_run(doubted).errors
    assert [finding.state for finding in check_run(doubted) if finding.text == text] == ["warning"]


def test_a_gain_that_no_number_of_images_shows_names_none() -> None:
    [(is_certain, text)] = doubts_of(gate__min_gain=1.0, evaluate__max_samples=50)
    assert is_certain and text.endswith("do not show it; expected a smaller bound")
