"""The gate: each requirement, its words, and the laws that hold for any evaluation."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.config.sections.output import GateConfig
from vlmpipe.registry.gate import Decision, decide
from vlmpipe.registry.paired_bootstrap import PairedAnswers, paired_bootstrap, shared_questions
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import seal, unseal

EVALUATION: dict[str, Any] = {
    "run_id": "run-b",
    "held_out_sha256": "abc",
    "exact_match": 0.9,
    "loss": 0.4,
    "cider_d": 1.5,
    "chance": 0.2,
    "images": 40,
    "images_also_in_train": 4,
    "slices": {"digit": {"exact_match": 0.95}, "sum": {"exact_match": 0.7}},
    "benchmarks": {"pope": {"scores": {"accuracy": 0.8, "f1": 0.7}}, "mmmu_val": {"scores": {"mmmu_acc": 0.4}}},
    "controls": {"shuffled_image": {"exact_match": 0.3}, "no_image": {"exact_match": 0.25}},
}
CHAMPION: dict[str, Any] = {"version": 3, "run_id": "run-a", "exact_match": 0.88, "held_out_sha256": "abc"}


def evaluation(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(EVALUATION), **changes}


def shared(questions: int, exact_match: float, champion: float) -> PairedAnswers:
    return PairedAnswers(questions, exact_match, champion, (exact_match - champion,) * 2)


def failed(decision: Decision) -> list[str]:
    return [check.name for check in decision.checks if not check.passed]


@pytest.mark.parametrize(
    ("gate", "failing"),
    [
        (GateConfig(min_exact_match=0.91), "exact match"),
        (GateConfig(max_loss=0.39), "loss"),
        (GateConfig(min_scores={"cider_d": 1.51}), "CIDEr-D"),
        (GateConfig(per_slice={"digit": 0.9, "sum": 0.8}), "exact match of sum"),
        (GateConfig(benchmarks={"pope": {"accuracy": 0.8, "f1": 0.71}}), "F1 of pope"),
        (GateConfig(benchmarks={"mmmu_val": {"mmmu_acc": 0.41}}), "mmmu_acc of mmmu_val"),
        (GateConfig(min_margin_over_chance=0.71), "margin over chance"),
        (GateConfig(min_margin_over_shuffled_image=0.61), "margin over shuffled image"),
        (GateConfig(max_images_also_in_train=0.09), "share of held-out images also in training"),
    ],
)
def test_each_threshold_alone_rejects_and_is_named(gate: GateConfig, failing: str) -> None:
    decision = decide(EVALUATION, gate)
    assert not decision.accepted
    assert failed(decision) == [failing]
    assert decision.reason.startswith("Rejected: ")
    assert failing in decision.reason


def test_an_acceptance_mentions_shared_images_only_if_there_are_any() -> None:
    decision = decide(evaluation(images_also_in_train=0), GateConfig(max_images_also_in_train=0.0))
    assert decision.reason == "Accepted: all 2 checks passed."
    unknown = evaluation()
    del unknown["images_also_in_train"]
    assert failed(decide(unknown, GateConfig(max_images_also_in_train=0.5)))


def test_values_exactly_at_their_thresholds_pass() -> None:
    # 0.9 - 0.2 and 0.9 - 0.3 are not exact in binary: a margin that was reached must not fail by rounding.
    gate = GateConfig(
        min_exact_match=0.9,
        max_loss=0.4,
        min_scores={"cider_d": 1.5},
        per_slice={"digit": 0.95},
        min_margin_over_chance=0.7,
        min_margin_over_shuffled_image=0.6,
        max_images_also_in_train=0.1,
    )
    decision = decide(EVALUATION, gate, {**CHAMPION, "exact_match": 0.9})
    assert decision.accepted
    assert decision.reason == ("Accepted: all 8 checks passed; 4 of 40 held-out images are also in the training split.")


def test_unknown_slice_is_a_failure_that_names_the_known_ones() -> None:
    decision = decide(EVALUATION, GateConfig(per_slice={"digits": 0.5}))
    assert not decision.accepted
    assert "no slice 'digits'; its slices are: digit, sum" in decision.reason


@pytest.mark.parametrize(
    ("without", "gate", "words"),
    [
        ("cider_d", GateConfig(min_scores={"cider_d": 1.0}), "the evaluation holds no cider_d"),
        ("benchmarks", GateConfig(benchmarks={"pope": {"f1": 0.1}}), "the evaluation holds no benchmarks.pope.f1"),
        ("exact_match", GateConfig(), "no exact_match"),
        ("loss", GateConfig(max_loss=1), "no loss"),
        ("chance", GateConfig(min_margin_over_chance=0.1), "no exact match of chance"),
        ("controls", GateConfig(min_margin_over_shuffled_image=0.0), "no exact match of shuffled image"),
        ("slices", GateConfig(per_slice={"digit": 0.0}), "its slices are: none"),
    ],
)
def test_a_missing_metric_is_a_failed_check_with_a_reason(without: str, gate: GateConfig, words: str) -> None:
    incomplete = evaluation()
    del incomplete[without]
    decision = decide(incomplete, gate)
    assert not decision.accepted
    assert words in decision.reason


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "0.9", True])
def test_a_value_that_is_not_finite_never_passes(value: object) -> None:
    gate = GateConfig(max_loss=10.0, per_slice={"digit": 0.0}, min_margin_over_chance=0.0)
    broken = evaluation(exact_match=value, loss=value, chance=value, slices={"digit": {"exact_match": value}})
    decision = decide(broken, gate, CHAMPION)
    assert len(failed(decision)) == len(decision.checks) == 5
    json.dumps(decision.model_dump(mode="json"), allow_nan=False)  # strict JSON even so


@pytest.mark.parametrize(("own", "accepted"), [(0.5, True), (0.49, False)])
def test_on_grown_data_the_questions_that_both_were_asked_decide(own: float, accepted: bool) -> None:
    champion = {**CHAMPION, "held_out_sha256": "other", "exact_match": 0.99}
    decision = decide(EVALUATION, GateConfig(when_not_comparable="reject"), champion, shared(40, own, 0.5))
    (check,) = (check for check in decision.checks if check.name == "no regression")
    assert (decision.accepted, check.value, check.threshold) == (accepted, own, 0.5)
    assert "(run run-a), on the 40 held-out questions that both were asked; difference" in check.why


def test_on_the_same_questions_the_recorded_numbers_decide() -> None:
    decision = decide(EVALUATION, GateConfig(), CHAMPION, shared(40, 0.0, 1.0))
    assert decision.accepted


@pytest.mark.parametrize(
    ("interval", "drop", "accepted"),
    [
        ((-0.02, 0.06), 0.0, False),
        ((0.001, 0.06), 0.0, True),
        ((-0.02, 0.06), 0.02, True),
        ((-0.021, 0.06), 0.02, False),
    ],
)
def test_the_far_end_of_the_interval_decides_where_it_is_asked_to(
    interval: tuple[float, float], drop: float, accepted: bool
) -> None:
    gate = GateConfig(regression_by="interval", max_regression=drop)
    decision = decide(EVALUATION, gate, CHAMPION, PairedAnswers(400, 0.9, 0.88, interval))
    (check,) = (check for check in decision.checks if check.name == "no regression")
    assert (decision.accepted, check.interval) == (accepted, interval)
    assert f"difference {interval[0]:+.4f} to {interval[1]:+.4f} (95 %, paired bootstrap)" in check.why
    assert Decision.model_validate(unseal(seal(decision.model_dump(mode="json")))) == decision
    assert "left no predictions" in decide(EVALUATION, gate, CHAMPION).reason


def predictions(right: Sequence[int], turns: int = 1) -> dict[Any, int]:
    return {(f"{number:05d}", turn, "q", "a"): one for number, one in enumerate(right) for turn in range(turns)}


def test_the_interval_is_that_of_the_mean_of_paired_differences() -> None:
    """Beside the normal approximation, of many independent questions: mean +- 1.96 standard errors."""
    differences = np.random.default_rng(1).choice([-1, 0, 1], 5000, p=[0.05, 0.87, 0.08])
    low, high = paired_bootstrap(predictions(differences))
    error = 1.96 * differences.std() / math.sqrt(len(differences))
    assert (low, high) == pytest.approx((differences.mean() - error, differences.mean() + error), abs=0.1 * error)
    assert paired_bootstrap(dict(reversed(predictions(differences).items()))) == (low, high)


def test_questions_about_one_sample_are_no_independent_evidence() -> None:
    differences = [1, -1, 0, 0, 1] * 40
    assert paired_bootstrap(predictions(differences, turns=9)) == pytest.approx(
        paired_bootstrap(predictions(differences))
    )
    assert paired_bootstrap(predictions([0, 0, 0])) == (0.0, 0.0)


def test_shared_questions_are_those_with_the_same_text_and_answer(tmp_path: Path) -> None:
    def left_by(name: str, *lines: tuple[str, str, bool]) -> LocalStorage:
        store = LocalStorage(tmp_path / name)
        found = [{"id": i, "turn": 0, "question": "q", "answer": a, "correct": c} for i, a, c in lines]
        store.write("predictions.jsonl", "".join(json.dumps(line) + "\n" for line in found).encode())
        return store

    champion = left_by("champion", ("a", "1", True), ("b", "2", True), ("c", "3", False), ("d", "4", True))
    own = left_by("own", ("a", "1", True), ("b", "2", False), ("c", "other", True), ("e", "5", True))
    assert shared_questions(own, champion) == PairedAnswers(2, 0.5, 1.0, (-1.0, 0.0))
    assert shared_questions(left_by("few", ("a", "1", True)), champion) is None
    assert shared_questions(own, LocalStorage(tmp_path / "gone")) is None


def test_worse_than_the_champion_is_rejected_beyond_the_allowed_drop() -> None:
    champion = {**CHAMPION, "exact_match": 0.93}
    assert not decide(EVALUATION, GateConfig(), champion).accepted
    assert decide(EVALUATION, GateConfig(max_regression=0.03), champion).accepted
    unchecked = decide(EVALUATION, GateConfig(max_regression=None), champion)
    assert unchecked.accepted
    assert "not compared with champion version 3" in unchecked.reason


def test_a_run_is_not_compared_with_itself() -> None:
    decision = decide(evaluation(run_id="run-a"), GateConfig(max_regression=1), CHAMPION)
    assert not decision.accepted
    assert "a model is not compared with itself" in decision.reason


@pytest.mark.parametrize(
    ("champion", "obstacle"),
    [
        ({**CHAMPION, "held_out_sha256": "other"}, "evaluated on other held-out questions"),
        ({**CHAMPION, "held_out_sha256": ""}, "not recorded which held-out questions"),
        ({**CHAMPION, "exact_match": math.nan}, "its exact match is not recorded"),
    ],
)
def test_an_incomparable_champion_is_named_and_treated_as_configured(champion: dict[str, Any], obstacle: str) -> None:
    skipped = decide(EVALUATION, GateConfig(), {**champion, "version": 7})
    assert skipped.accepted
    assert "not comparable with champion version 7" in skipped.reason
    assert obstacle in skipped.reason
    refused = decide(EVALUATION, GateConfig(when_not_comparable="reject"), champion)
    assert failed(refused) == ["no regression"]


def test_decision_json_round_trips() -> None:
    decision = decide(EVALUATION, GateConfig(min_exact_match=0.5), CHAMPION)
    content = unseal(seal(decision.model_dump(mode="json")))
    assert Decision.model_validate(content) == decision
    assert content["champion"] == {"version": 3, "run_id": "run-a", "exact_match": 0.88}
    fields = {"name", "metric", "slice", "value", "threshold", "is_upper", "interval", "passed", "why"}
    assert set(content["checks"][0]) == fields


def test_a_check_says_whether_its_threshold_is_an_upper_one() -> None:
    evaluation = {**EVALUATION, "relevance": {"mean_image_tokens": 3.0}}
    decision = decide(evaluation, GateConfig(min_exact_match=0.5, max_loss=9.0, max_mean_image_tokens=4), None)
    assert {check.metric for check in decision.checks if check.is_upper} == {"loss", "relevance.mean_image_tokens"}
    assert all(check.passed for check in decision.checks)


shares = st.floats(0, 1)
numbers = st.one_of(st.floats(0, 1), st.just(math.nan), st.none())
evaluations = st.fixed_dictionaries(
    {
        "run_id": st.sampled_from(["run-a", "run-b"]),
        "held_out_sha256": st.sampled_from(["abc", "other", ""]),
        "exact_match": numbers,
        "loss": numbers,
        "chance": numbers,
        "slices": st.dictionaries(st.sampled_from("ab"), st.fixed_dictionaries({"exact_match": numbers})),
        "controls": st.one_of(st.just({}), st.fixed_dictionaries({"shuffled_image": st.just({"exact_match": 0.5})})),
    }
)
champions = st.one_of(st.none(), st.builds(lambda share: {**CHAMPION, "exact_match": share}, numbers))
gates = st.builds(
    GateConfig,
    min_exact_match=shares,
    max_loss=st.one_of(st.none(), st.floats(0.01, 1)),
    per_slice=st.dictionaries(st.sampled_from("ab"), shares),
    max_regression=st.one_of(st.none(), shares),
    when_not_comparable=st.sampled_from(["skip", "reject"]),
    min_margin_over_chance=st.one_of(st.none(), shares),
    min_margin_over_shuffled_image=st.one_of(st.none(), shares),
)


@given(evaluations, gates, champions)
def test_accepted_exactly_when_every_check_passed(
    measured: dict[str, Any], gate: GateConfig, champion: dict[str, Any] | None
) -> None:
    before = copy.deepcopy(champion)
    decision = decide(measured, gate, champion)
    assert decision.accepted == (not failed(decision))
    assert repr(champion) == repr(before)
    assert "\n" not in decision.reason


@given(evaluations, gates, champions, st.data())
def test_tightening_a_threshold_never_turns_a_rejection_into_acceptance(
    measured: dict[str, Any], gate: GateConfig, champion: dict[str, Any] | None, data: st.DataObject
) -> None:
    def higher(floor: float | None) -> float:
        return data.draw(st.floats(floor or 0.0, 1))

    tighter: dict[str, Any] = {
        "min_exact_match": higher(gate.min_exact_match),
        "max_loss": data.draw(st.floats(0.005, gate.max_loss or 1)),
        "per_slice": {**gate.per_slice, "a": higher(gate.per_slice.get("a"))},
        "max_regression": data.draw(st.floats(0, 1 if gate.max_regression is None else gate.max_regression)),
        "when_not_comparable": "reject",
        "min_margin_over_chance": higher(gate.min_margin_over_chance),
        "min_margin_over_shuffled_image": higher(gate.min_margin_over_shuffled_image),
    }
    name = data.draw(st.sampled_from(sorted(tighter)))
    if not decide(measured, gate, champion).accepted:
        assert not decide(measured, gate.model_copy(update={name: tighter[name]}), champion).accepted


@given(evaluations, gates, champions, shares)
def test_a_better_exact_match_never_turns_acceptance_into_rejection(
    measured: dict[str, Any], gate: GateConfig, champion: dict[str, Any] | None, share: float
) -> None:
    if decide(measured, gate, champion).accepted:
        better = max(share, measured["exact_match"])
        assert decide({**measured, "exact_match": better}, gate, champion).accepted
