"""What a learning curve answers on synthetic answers with a known truth, and how often its interval holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.support.short_form import WHOLE
from vlmpipe.comparison.curve.curve import curve_of, fitted_laws, hidden, points_of, predicted
from vlmpipe.comparison.curve.page import curve_section
from vlmpipe.comparison.sweep.results import SweepResults, Training
from vlmpipe.records.learning_curve import LearningCurve, TrainingCost
from vlmpipe.runs.folders.curve import curve_lines
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.sweep import SHARE, Sweep, SweepVariant

SHARES = {"a": 0.05, "b": 0.1, "c": 0.2, "d": 0.4, "e": 1.0}
Error = Callable[[float], float]


def slow(samples: float) -> float:
    return 0.05 + 0.5 * (samples / 100) ** -0.5


def answers(
    error: Error,
    shares: Mapping[str, float],
    *,
    starts: int = 3,
    questions: int = 300,
    seed: int = 0,
    spread: float = 0.0,
) -> list[Training]:
    """Answers to the same questions, which are hard or easy for all trainings, wrong as often as `error` of 2000."""
    chance = np.random.default_rng(seed)
    hard, found = chance.random(questions), []
    for name, share in shares.items():
        for start in range(starts):
            rate = np.clip(error(2000 * share) + chance.normal(0, spread), 0, 1)
            wrong = np.where(chance.random(questions) < 0.3, chance.random(questions) < rate, hard < rate)
            scores: dict[Any, float] = {(f"s{place}", 0, "q", "a"): float(not one) for place, one in enumerate(wrong)}
            evaluation = Evaluation(chance=0.1, exact_match=float(1 - wrong.mean()))
            found.append(Training(name, start, "runs/x", scores=scores, evaluation=evaluation, train_s=10 * share))
    return found


def curve(
    trainings: list[Training], shares: Mapping[str, float] = SHARES, *, goal: float = 0.9, **fields: Any
) -> LearningCurve:
    variants = tuple(SweepVariant(name=name, values={SHARE: share}) for name, share in shares.items())
    fixed = {"metric": "exact_match", "baseline": "a", "starts": 3, "parallelism": 1, "trainings": (), "jobs": ()}
    sweep = Sweep(variants=variants, goal=goal, **{**fixed, **fields})
    samples = {name: 2000 * share for name, share in shares.items()}
    cost = TrainingCost(fixed_hours=0.0, per_sample_hours=0.001, usd_per_hour=2.0)
    return curve_of(SweepResults(sweep, trainings, 1.0), samples, 5, cost)


def test_the_samples_for_a_goal_their_cost_and_where_noise_begins() -> None:
    found = curve(answers(slow, SHARES), goal=0.9)
    # 0.05 of 0.1 are the floor: (0.5 / 0.05)^2 x 100 = 10,000 samples.
    assert found.answer == "needs" and found.needed and found.law
    assert found.needed.low < 10_000 < (found.needed.high or np.inf)
    assert found.cost and found.needed_cost_usd == pytest.approx(found.needed.value * 0.002)
    assert found.noise_from and found.visible and 0 < found.visible < 0.2
    lines = curve_lines(found)
    assert lines[0].startswith("90 % needs about")
    assert "more than there are; training on them takes $" in lines[0]
    assert any("nothing is seen above noise" in line or "more to gain than noise" in line for line in lines)


@pytest.mark.parametrize(
    ("error", "goal", "answer"),
    [
        (slow, 0.70, "reached"),
        (lambda samples: 0.3 + 4 / samples, 0.9, "above the ceiling"),
        (lambda samples: 0.8 * (samples / 100) ** -0.25, 0.8, "too far"),
        (lambda samples: 0.3, 0.9, "flat"),
        (lambda samples: 0.1 + samples / 5000, 0.95, "flat"),  # more samples make it worse
        (lambda samples: 0.95, 0.9, "nothing learned"),
    ],
)
def test_what_cannot_be_said_is_not_said(error: Error, goal: float, answer: str) -> None:
    found = curve(answers(error, SHARES), goal=goal)
    assert found.answer == answer, found.decision
    assert (found.needed is not None) == (answer in ("needs", "reached"))
    assert ("cannot be said" in found.decision) == (answer not in ("needs", "reached")) == bool(found.advice)
    assert found.advice in " ".join(line.strip() for line in curve_lines(found)[:6])
    assert found.decision[:20] in str(curve_section(found)) or found.decision[1:20] in str(curve_section(found))


def test_two_shares_and_few_images_are_too_few() -> None:
    two = {"a": 0.1, "e": 1.0}
    assert curve(answers(slow, two), two).answer == "too few points"
    few = answers(slow, SHARES, questions=5)
    assert curve(few).answer == "too few images"


def test_shares_at_the_baseline_are_left_out_and_said() -> None:
    found = curve(answers(lambda samples: 0.92 if samples < 300 else slow(samples), SHARES))
    assert [point.at_baseline for point in found.points] == [True, True, False, False, False]
    assert [point.fitted for point in found.points] == [False, False, True, True, True]
    assert any("not above the majority baseline: 5 %, 10 %" in note for note in found.notes)


def test_skipped_and_failed_trainings_are_counted() -> None:
    trainings = [one for one in answers(slow, SHARES) if one.variant != "a" or one.start == 0]
    trainings += [Training("a", start, "runs/x", error="baseline", is_skipped=True) for start in (1, 2)]
    trainings = [one for one in trainings if one.variant != "d"] + [Training("d", 0, "runs/x", error="out of memory")]
    found = curve(trainings)
    assert (found.points[0].skipped, found.points[0].errors) == (2, ())
    assert (found.points[3].score, found.points[3].errors) == (None, ("out of memory",))
    assert any("2 further starts" in note for note in found.notes) and any("40 %" in note for note in found.notes)


def test_a_curve_says_how_long_its_trainings_are() -> None:
    found = curve(answers(slow, SHARES))
    assert "each training has 5 epochs of its share, a smaller share fewer steps" in curve_lines(found)
    ended = " ".join(line.strip() for line in curve_lines(found.model_copy(update={"max_steps": 300})))
    assert "at most 5 epochs of its share and at most 300 steps (train.max_steps)" in ended
    assert "fewer steps" not in ended


def test_an_answer_that_the_largest_share_contradicts_is_given_with_what_to_change() -> None:
    found = curve(answers(slow, SHARES), goal=0.9)
    assert found.checked and found.checked.measured and found.checked.is_inside and not found.advice
    high = found.checked.score.high or 1.0
    outside = found.model_copy(update={"checked": found.checked.model_copy(update={"measured": high + 0.02})})
    assert "let smaller shares, which have fewer steps, train as long" in " ".join(curve_lines(outside)[:5])
    assert not outside.model_copy(update={"max_steps": 300}).advice, "they have as many"


def test_the_record_is_read_as_it_was_written(tmp_path: Any) -> None:
    from vlmpipe.trainer.storage import open_storage

    found, store = curve(answers(slow, SHARES)), open_storage(str(tmp_path))
    found.write(store)
    assert LearningCurve.read(store).content() == found.content()


def exponential(samples: float) -> float:
    return float(0.12 + 0.6 * np.exp(-samples / 300))


@pytest.mark.parametrize("error", [slow, exponential])
def test_the_interval_holds_the_truth_in_about_four_of_five_cases(error: Error) -> None:
    """Of the score at four times the samples, and of the largest share predicted from the smaller ones."""
    trials = 200 if WHOLE else 15
    inside = {"4 times the samples": 0, "the hidden share": 0}
    for seed in range(trials):
        points = points_of(
            _by_name(answers(error, SHARES, seed=seed, spread=0.01)), {n: 2000 * s for n, s in SHARES.items()}
        )
        far = predicted(fitted_laws(points), points, 8000.0, starts=10**9).score
        inside["4 times the samples"] += far.low <= 1 - error(8000) <= (far.high or 1)
        largest = hidden(points.some([0, 1, 2, 3]), 2000.0, starts=3).score
        inside["the hidden share"] += largest.low <= points.means[-1] <= (largest.high or 1)
    deviation = np.sqrt(0.8 * 0.2 / trials)
    for what, count in inside.items():
        assert 0.8 - 3 * deviation <= count / trials <= min(1.0, 0.92 + 3 * deviation), (what, count / trials)


def test_few_starts_widen_intervals() -> None:
    """Their spread is an estimate, the less known the fewer they are."""
    samples = {name: 2000 * share for name, share in SHARES.items()}
    two = points_of(_by_name(answers(slow, SHARES, starts=2, spread=0.05)), samples)
    assert two.freedom == 5
    tails = np.abs(two.draws - two.means) / two.draws.std(0) > 3
    assert tails.mean() > 0.006, "twice as many far draws as a normal error has"


def _by_name(trainings: list[Training]) -> dict[str, list[Training]]:
    found: dict[str, list[Training]] = {}
    for one in trainings:
        found.setdefault(one.variant, []).append(one)
    return found
