"""The gate beside the weights that training started from."""

from __future__ import annotations

from typing import Any

import pytest

from vlmpipe.config.sections.output import GateConfig
from vlmpipe.registry.gate import decide
from vlmpipe.trainer.evaluation.significance.paired import PairedCounts, interval
from vlmpipe.trainer.records.evaluation import Evaluation


def counts(only_model: int, only_other: int, questions: int = 200, images: int | None = None) -> dict[str, Any]:
    images = questions if images is None else images
    return PairedCounts(
        questions=questions, only_model=only_model, only_other=only_other, images=images,
        design_effect=questions / images,
    ).model_dump()  # fmt: skip


def decided(start: dict[str, Any] | None, **bounds: float) -> tuple[bool, str]:
    content: dict[str, Any] = {"questions": 200, "exact_match": 0.5} | ({"start": start} if start else {})
    gate = GateConfig(min_margin_over_chance=None, **bounds)  # type: ignore[arg-type]
    decision = decide(Evaluation.model_validate(content), gate)
    return decision.accepted, decision.reason


def test_a_gain_must_be_above_the_bound_by_its_interval() -> None:
    clear = counts(60, 10)
    low, _ = interval(PairedCounts.model_validate(clear))
    assert decided({"paired": clear}, min_gain=low - 0.001)[0]
    accepted, reason = decided({"paired": clear}, min_gain=low + 0.001)
    assert not accepted and f"{low:+.4f} to" in reason and "200 questions" in reason
    assert not decided({"paired": counts(0, 0)}, min_gain=0.0)[0], "a model equal to its start has gained nothing"


def test_questions_about_few_images_show_less() -> None:
    assert decided({"paired": counts(30, 12)}, min_gain=0.0)[0]
    assert not decided({"paired": counts(30, 12, images=40)}, min_gain=0.0)[0]


def test_forgetting_must_be_ruled_out() -> None:
    kept = {"paired": counts(0, 0), "retention": {"paired": counts(4, 6)}}
    lost = {"paired": counts(0, 0), "retention": {"paired": counts(0, 60)}}
    assert decided(kept, max_forgetting=0.1) == (True, decided(kept, max_forgetting=0.1)[1])
    accepted, reason = decided(lost, max_forgetting=0.1)
    assert not accepted and "does not rule out a loss of 0.1" in reason


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (None, "the evaluation asked no start weights"),
        ({"obstacle": "training starts from random weights"}, "training starts from random weights"),
        ({"paired": counts(3, 0)}, "the evaluation asked no retention probe"),
        ({"paired": counts(3, 0), "retention": {"obstacle": "no validation sample has an image"}}, "has an image"),
    ],
)
def test_what_was_not_compared_is_no_success(start: dict[str, Any] | None, said: str) -> None:
    accepted, reason = decided(start, max_forgetting=0.5)
    assert not accepted and said in reason


def test_too_few_probe_questions_decide_nothing() -> None:
    accepted, reason = decided({"retention": {"paired": counts(0, 0, questions=20)}}, max_forgetting=0.5)
    assert not accepted and "fewer than gate.min_questions, 50" in reason
