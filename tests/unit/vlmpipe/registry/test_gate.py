"""The gate: each requirement, its words, and the laws that hold for any evaluation."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.data.index import write_index
from vlmpipe.config.sections.output import GateConfig
from vlmpipe.records.decision import Champion, Decision
from vlmpipe.registry.gate import AgainstChampion
from vlmpipe.registry.gate import decide as decide_by
from vlmpipe.registry.recorded_answers import recorded_answers
from vlmpipe.trainer.evaluation.significance.paired import PairedCounts
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import seal, unseal

EVALUATION: dict[str, Any] = {
    "questions": 1000,
    "exact_match": 0.9,
    "loss": 0.4,
    "cider_d": 1.5,
    "chance": 0.2,
    "images": 40,
    "images_also_in_train": 4,
    "images_like_train": 6,
    "slices": {"digit": {"exact_match": 0.95}, "sum": {"exact_match": 0.7}},
    "benchmarks": {
        "pope": {"scores": {"accuracy": 0.8, "f1": 0.7}, "images": 30, "images_like_train": 3},
        "chart_qa": {"scores": {"accuracy": 0.5}, "images": 10, "images_like_train": 2, "like_train_compared": 0.5},
        "mmmu_val": {"scores": {"mmmu_acc": 0.4}},  # of lmms-eval, whose images are not seen
    },
    "controls": {"shuffled_image": {"exact_match": 0.3}, "no_image": {"exact_match": 0.25}},
}
CHAMPION: dict[str, Any] = {"version": 3, "run_id": "run-a", "exact_match": 0.88}


def decide(measured: dict[str, Any], gate: GateConfig, champion: AgainstChampion | None = None) -> Decision:
    return decide_by(Evaluation.model_validate(measured), gate, champion)


def evaluation(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(EVALUATION), **changes}


def paired(only_model: int, only_other: int, questions: int = 1000, **more: Any) -> PairedCounts:
    return PairedCounts(
        **{"questions": questions, "only_model": only_model, "only_other": only_other, "images": questions} | more
    )


def against(answers: PairedCounts | None, obstacle: str = "", **champion: Any) -> AgainstChampion:
    return AgainstChampion(Champion.model_validate(CHAMPION | champion), answers, obstacle)


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
        (GateConfig(min_margin_over_chance=0.71), "margin over majority baseline"),
        (GateConfig(min_margin_over_shuffled_image=0.61), "margin over shuffled image"),
        (GateConfig(max_images_also_in_train=0.09), "share of validation images also in training"),
        (GateConfig(max_images_like_train=0.19), "share of images of chart_qa that look like training images"),
    ],
)
def test_each_threshold_alone_rejects_and_is_named(gate: GateConfig, failing: str) -> None:
    decision = decide(EVALUATION, gate)
    assert not decision.accepted
    assert failed(decision) == [failing]
    assert decision.reason.startswith("Rejected: ")
    assert failing in decision.reason


def test_an_acceptance_mentions_shared_images_only_if_there_are_any() -> None:
    without = evaluation(images_also_in_train=0, images_like_train=0, benchmarks={})
    decision = decide(without, GateConfig(max_images_also_in_train=0.0, max_images_like_train=0.0))
    assert decision.reason == "Accepted: all 4 checks passed."
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
    decision = decide(EVALUATION, gate)
    assert decision.accepted
    assert decision.reason == (
        "Accepted: all 8 checks passed; 4 of 40 validation images are also in the training split; "
        "6 of 40 validation images look like training images; 3 of 30 images of pope look like training images; "
        "2 of 10 images of chart_qa look like training images (50% of the pairs compared)."
    )


@pytest.mark.parametrize("bound", ["max_images_also_in_train", "max_images_like_train"])
def test_a_bound_on_images_of_training_is_a_bound(bound: str) -> None:
    unbound = {"min_margin_over_chance": None, "max_regression": None}
    assert not GateConfig(**unbound).checks_something
    assert decide(EVALUATION, GateConfig(**unbound, **{bound: 0.5})).accepted
    assert not decide(EVALUATION, GateConfig(**unbound, **{bound: 0.0})).accepted


def test_a_bound_on_look_alikes_holds_for_each_set_of_images_that_was_seen() -> None:
    decision = decide(EVALUATION, GateConfig(max_images_like_train=0.2))
    metrics = [check.metric for check in decision.checks if check.metric.endswith("images_like_train")]
    assert metrics == [
        "images_like_train",
        "benchmarks.chart_qa.images_like_train",
        "benchmarks.pope.images_like_train",
    ]
    assert decision.accepted
    unseen = evaluation()
    del unseen["images_like_train"]
    assert failed(decide(unseen, GateConfig(max_images_like_train=1.0)))


def test_bounds_of_slices_and_benchmarks_say_on_how_many_questions_they_stand() -> None:
    """Three questions that are right reach any bound: whoever reads the decision has to see that they are three."""
    measured = evaluation(
        slices={"digit": {"exact_match": 1.0, "questions": 3}},
        benchmarks={"pope": {"scores": {"f1": 0.7}, "questions": 3000}},
    )
    decision = decide(measured, GateConfig(per_slice={"digit": 0.9}, benchmarks={"pope": {"f1": 0.8}}))
    found = {check.name: (check.why, check.questions) for check in decision.checks}
    assert found["exact match of digit"] == ("exact match of digit 1 reaches the required 0.9 (3 questions)", 3)
    assert found["F1 of pope"] == ("F1 of pope 0.7 is below the required 0.8 (3,000 questions)", 3000)


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
        ("questions", GateConfig(), "no questions"),
        ("loss", GateConfig(max_loss=1), "no loss"),
        ("chance", GateConfig(min_margin_over_chance=0.1), "no exact match of majority baseline"),
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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_a_value_that_is_not_finite_never_passes(value: object) -> None:
    gate = GateConfig(max_loss=10.0, per_slice={"digit": 0.0}, min_margin_over_chance=0.0)
    broken = evaluation(exact_match=value, loss=value, chance=value, slices={"digit": {"exact_match": value}})
    decision = decide(broken, gate)
    assert len(failed(decision)) == len(decision.checks) - 1 == 3, "all but the number of questions"
    json.dumps(decision.model_dump(mode="json"), allow_nan=False)  # strict JSON even so


@pytest.mark.parametrize(
    ("answers", "drop", "accepted"),
    [
        (paired(50, 50), "auto", True),
        (paired(50, 50, 100), "auto", False),  # as good, but 100 such questions cannot tell
        (paired(40, 60), "auto", False),
        (paired(40, 60), 0.05, True),
        (paired(0, 0, 60), "auto", True),
        (paired(0, 0, 49), "auto", False),  # below gate.min_questions
        (paired(3, 0, 3), "auto", False),
        (paired(50, 50, images=100, design_effect=10.0), "auto", False),  # on 100 images
    ],
)
def test_a_drop_must_be_ruled_out_by_the_answers(answers: PairedCounts, drop: Any, accepted: bool) -> None:
    gate = GateConfig(max_regression=drop)
    decision = decide(EVALUATION, gate, against(answers))
    (check,) = (check for check in decision.checks if check.name == "no regression")
    assert (decision.accepted, check.questions) == (accepted, answers.questions)
    assert f"{answers.questions:,} questions" in check.why
    assert check.threshold == -(gate.margin(answers.questions) or 0)
    assert Decision.model_validate(unseal(seal(decision.model_dump(mode="json")))) == decision


def test_the_margin_and_where_it_comes_from_are_said() -> None:
    reason = decide(EVALUATION, GateConfig(), against(paired(50, 50))).reason
    assert "rules out a drop of 0.02486, the smallest that this number of questions can detect" in reason
    assert "the smallest" not in decide(EVALUATION, GateConfig(max_regression=0.03), against(paired(50, 50))).reason


@pytest.mark.parametrize(
    ("key", "field", "name"),
    [
        ("chance", "min_margin_over_chance", "margin over majority baseline"),
        ("shuffled_image", "min_margin_over_shuffled_image", "margin over shuffled image"),
    ],
)
def test_a_margin_over_a_baseline_is_shown_by_answers_where_there_are_any(key: str, field: str, name: str) -> None:
    def failing(answers: PairedCounts, threshold: float) -> list[str]:
        measured = evaluation(paired={key: answers.model_dump()})
        return failed(decide(measured, GateConfig(**{field: threshold})))

    assert failing(paired(300, 0), 0.2) == []
    assert failing(paired(210, 0), 0.2) == [name]  # within what 1,000 questions may differ by
    assert failing(paired(52, 50), 0.0) == [name]  # a model that does not look
    assert failing(paired(40, 0, 40), 0.0) == [name]  # on questions of which too few have another image


def test_shares_alone_decide_where_a_program_left_no_answers_and_that_is_said() -> None:
    checks = decide(EVALUATION, GateConfig()).checks
    assert "by shares alone" in checks[-1].why and checks[-1].passed


def test_a_gate_without_bounds_accepts_nothing_unless_it_is_none() -> None:
    unbounded = GateConfig(min_margin_over_chance=None)
    decision = decide(EVALUATION, unbounded)
    assert not decision.accepted and "the gate has no bound" in decision.reason
    accepting = decide({}, GateConfig.model_validate("none"), against(None, "its answers are gone"))
    assert (accepting.accepted, accepting.reason) == (True, "Accepted: the gate is none.")
    with pytest.raises(ValueError, match="max_loss with bounds none"):
        GateConfig(bounds="none", max_loss=1.0)
    with pytest.raises(ValueError, match="greater than 0"):
        GateConfig(max_regression=0.0)
    assert GateConfig.model_validate(GateConfig(bounds="none").model_dump()).bounds == "none"


def test_a_model_that_knows_nothing_is_not_accepted_by_default() -> None:
    measured = evaluation(exact_match=0.0, chance=0.0, paired={"chance": paired(0, 0).model_dump()})
    assert failed(decide(measured, GateConfig())) == ["margin over majority baseline"]


def test_recorded_answers_are_those_with_the_same_text_and_answer(tmp_path: Path) -> None:
    def left_by(name: str, *lines: tuple[str, str, bool]) -> LocalStorage:
        store = LocalStorage(tmp_path / name)
        found = [{"id": i, "turn": 0, "question": "q", "answer": a, "correct": c} for i, a, c in lines]
        store.write("predictions.jsonl", "".join(json.dumps(line) + "\n" for line in found).encode())
        return store

    prepared = write_index(tmp_path / "prepared", {"a": ["x"], "b": ["x"], "d": [], "f": ["y", "z"]})
    champion = left_by("champion", ("a", "1", True), ("b", "2", True), ("c", "3", False), ("d", "4", True))
    own = left_by("own", ("a", "1", True), ("b", "2", False), ("c", "other", True), ("e", "5", True))
    pointers = {"prepared_uri": str(prepared), "features_uri": "", "features": "off"}
    own.write("prepared.json", json.dumps(pointers).encode())
    compared = PairedCounts(questions=2, only_model=0, only_other=1, images=1, design_effect=2.0)
    assert recorded_answers(own, champion) == compared, "two questions about one image"
    assert recorded_answers(left_by("few", ("a", "1", True)), champion) is None
    assert recorded_answers(own, LocalStorage(tmp_path / "gone")) is None


def test_without_a_bound_on_the_drop_the_champion_is_not_compared() -> None:
    unchecked = decide(EVALUATION, GateConfig(max_regression=None), against(paired(0, 1000)))
    assert unchecked.accepted
    assert "not compared with champion version 3" in unchecked.reason


def test_a_run_is_not_compared_with_itself() -> None:
    decision = decide(EVALUATION, GateConfig(max_regression=1), replace(against(None), is_this_run=True))
    assert not decision.accepted
    assert "a model is not compared with itself" in decision.reason


def test_no_alias_moves_beside_an_incomparable_champion_unless_it_may() -> None:
    champion = against(None, "its run is gone", exact_match=math.nan)
    refused = decide(EVALUATION, GateConfig(), champion)
    assert failed(refused) == ["no regression"]
    assert "not comparable with champion version 3 (run run-a): its run is gone" in refused.reason
    skipped = decide(EVALUATION, GateConfig(when_not_comparable="skip"), champion)
    assert skipped.accepted
    assert "its run is gone, so the other checks alone decide" in skipped.reason
    assert skipped.champion and skipped.champion.exact_match is None


def test_decision_json_round_trips() -> None:
    decision = decide(EVALUATION, GateConfig(min_exact_match=0.5), against(paired(9, 9)))
    content = unseal(seal(decision.model_dump(mode="json")))
    assert Decision.model_validate(content) == decision
    assert content["champion"] == {"version": 3, "run_id": "run-a", "checkpoint": "", "exact_match": 0.88}
    fields = {"name", "metric", "slice", "value", "threshold", "is_upper", "interval", "questions", "passed", "why"}
    assert set(content["checks"][0]) == fields


def test_a_check_says_whether_its_threshold_is_an_upper_one() -> None:
    evaluation = {**EVALUATION, "relevance": {"mean_image_tokens": 3.0}}
    decision = decide(evaluation, GateConfig(min_exact_match=0.5, max_loss=9.0, max_mean_image_tokens=4))
    assert {check.metric for check in decision.checks if check.is_upper} == {"loss", "relevance.mean_image_tokens"}
    assert all(check.passed for check in decision.checks)


shares = st.floats(0, 1)
numbers = st.one_of(st.floats(0, 1), st.just(math.nan), st.none())
counts = st.builds(
    lambda model, other, both: paired(model, other, model + other + both),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(0, 200),
)
evaluations = st.fixed_dictionaries(
    {
        "questions": st.sampled_from([10, 50, 1000]),
        "exact_match": numbers,
        "loss": numbers,
        "chance": numbers,
        "slices": st.dictionaries(st.sampled_from("ab"), st.fixed_dictionaries({"exact_match": numbers})),
        "controls": st.one_of(st.just({}), st.fixed_dictionaries({"shuffled_image": st.just({"exact_match": 0.5})})),
        "paired": st.dictionaries(st.sampled_from(["chance", "shuffled_image"]), counts.map(PairedCounts.model_dump)),
    }
)
champions = st.one_of(st.none(), st.builds(against, st.one_of(st.none(), counts), exact_match=numbers))
gates = st.builds(
    GateConfig,
    min_exact_match=shares,
    max_loss=st.one_of(st.none(), st.floats(0.01, 1)),
    per_slice=st.dictionaries(st.sampled_from("ab"), shares),
    max_regression=st.one_of(st.none(), st.floats(0.001, 1)),
    when_not_comparable=st.sampled_from(["skip", "reject"]),
    min_questions=st.integers(1, 100),
    min_margin_over_chance=st.one_of(st.none(), shares),
    min_margin_over_shuffled_image=st.one_of(st.none(), shares),
)


@given(evaluations, gates, champions)
def test_accepted_exactly_when_every_check_passed(
    measured: dict[str, Any], gate: GateConfig, champion: AgainstChampion | None
) -> None:
    decision = decide(measured, gate, champion)
    assert decision.accepted == (not failed(decision) and gate.checks_something)
    assert "\n" not in decision.reason


@given(evaluations, gates, champions, st.data())
def test_tightening_a_threshold_never_turns_a_rejection_into_acceptance(
    measured: dict[str, Any], gate: GateConfig, champion: AgainstChampion | None, data: st.DataObject
) -> None:
    def higher(floor: float | None) -> float:
        return data.draw(st.floats(floor or 0.0, 1))

    most = 1.0 if gate.max_regression is None else gate.max_regression
    assert most != "auto"
    tighter: dict[str, Any] = {
        "min_exact_match": higher(gate.min_exact_match),
        "max_loss": data.draw(st.floats(0.005, gate.max_loss or 1)),
        "per_slice": {**gate.per_slice, "a": higher(gate.per_slice.get("a"))},
        "max_regression": data.draw(st.floats(0.0005, most)),
        "when_not_comparable": "reject",
        "min_questions": gate.min_questions + data.draw(st.integers(0, 100)),
        "min_margin_over_chance": higher(gate.min_margin_over_chance),
        "min_margin_over_shuffled_image": higher(gate.min_margin_over_shuffled_image),
    }
    name = data.draw(st.sampled_from(sorted(tighter)))
    if gate.checks_something and not decide(measured, gate, champion).accepted:
        assert not decide(measured, gate.model_copy(update={name: tighter[name]}), champion).accepted


@given(evaluations, gates, counts, st.integers(0, 60))
def test_a_better_model_never_turns_acceptance_into_rejection(
    measured: dict[str, Any], gate: GateConfig, answers: PairedCounts, more: int
) -> None:
    if decide(measured, gate, against(answers)).accepted:
        right = min(more, answers.only_other)  # questions that only the champion answered, and now the model too
        better = answers.model_copy(update={"only_other": answers.only_other - right})
        assert decide(measured, gate, against(better)).accepted
