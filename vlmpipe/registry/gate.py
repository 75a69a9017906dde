"""The gate: decides by recorded numbers whether a new model may replace the champion.

Every requirement becomes one `Check` with its value, its threshold and a sentence that explains it. A required number
that the evaluation lacks is a failed check. Comparisons with the champion, the majority baseline and the shuffled image
are tests of answers to the same questions (`vlmpipe.trainer.evaluation.significance.paired`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vlmpipe.config.sections.output import GateConfig
from vlmpipe.records.decision import Champion, Check, Decision
from vlmpipe.registry.start_checks import GAIN, RETENTION, start_checks
from vlmpipe.registry.tested_difference import TestedDifference
from vlmpipe.trainer.config.benchmarks import TITLES
from vlmpipe.trainer.evaluation.significance.paired import PairedCounts
from vlmpipe.trainer.records.evaluation import BenchmarkScores, Evaluation, Scores
from vlmpipe.trainer.records.evaluation_notes import overlap_sentence

# A margin is a difference of two rounded shares: 0.3 - 0.1 must reach a threshold of 0.2.
ROUNDING = 1e-9
SCORE_NAMES = {
    "vqa_accuracy": "VQA accuracy",
    "anls": "ANLS",
    "cider_d": "CIDEr-D",
    "preference_accuracy": "preference accuracy",
}
Baseline = Literal["chance", "shuffled_image"]
NOTED = ("no regression", GAIN, RETENTION)  # checks whose figures an accepted model's reason has
BASELINE_NAMES: dict[Baseline, str] = {"chance": "majority baseline", "shuffled_image": "shuffled image"}


@dataclass(frozen=True)
class AgainstChampion:
    """The model in use, asked the questions of this evaluation.

    champion: its registration.
    paired: this model's answers and the champion's to the same questions; None where they could not be compared.
    obstacle: why not.
    where: what the answers are, for the reason.
    is_this_run: it is the very checkpoint that was evaluated.
    """

    champion: Champion
    paired: PairedCounts | None = None
    obstacle: str = ""
    where: str = ""
    is_this_run: bool = False


def decide(evaluation: Evaluation, gate: GateConfig, against: AgainstChampion | None = None) -> Decision:
    """Check `evaluation` against `gate` and the champion.

    Args:
        evaluation: of the run.
        gate: the thresholds.
        against: the model in use, or None if there is none.
    """
    champion = against.champion if against is not None else None
    if champion is not None:
        champion = champion.model_copy(update={"exact_match": _finite(champion.exact_match)})
    if gate.bounds == "none":
        return Decision(accepted=True, reason="Accepted: the gate is none.", checks=(), champion=champion)
    if not gate.checks_something:
        why = "the gate has no bound, with which it accepts nothing; set one, or gate: none"
        return Decision(accepted=False, reason=f"Rejected: {why}.", checks=(), champion=champion)
    exact_match = evaluation.exact_match
    checks = [_limit("questions", "questions", evaluation.questions, gate.min_questions)]
    if gate.min_exact_match:
        checks.append(_limit("exact match", "exact_match", exact_match, gate.min_exact_match))
    if gate.max_loss is not None:
        checks.append(_limit("loss", "loss", evaluation.loss, gate.max_loss, upper=True))
    for metric, floor in sorted(gate.min_scores.items()):
        checks.append(_limit(SCORE_NAMES[metric], metric, getattr(evaluation, metric), floor))
    checks += [_slice_check(name, floor, evaluation.slices) for name, floor in sorted(gate.per_slice.items())]
    result = {name: benchmark.scores for name, benchmark in evaluation.benchmarks.items()}
    checks += [
        _limit(
            f"{TITLES.get(metric, metric)} of {name}",
            f"benchmarks.{name}.{metric}",
            result.get(name, {}).get(metric),
            floor,
            questions=evaluation.benchmarks[name].questions if name in result else None,
        )
        for name, floors in sorted(gate.benchmarks.items())
        for metric, floor in sorted(floors.items())
    ]
    checks += [_margin(over, evaluation, gate, threshold) for over, threshold in _margins(gate)]
    checks += start_checks(evaluation.start, gate)
    if gate.max_mean_image_tokens is not None:
        tokens = (evaluation.relevance or {}).get("mean_image_tokens")
        most = gate.max_mean_image_tokens
        checks.append(_limit("tokens an image", "relevance.mean_image_tokens", tokens, most, upper=True))
    if gate.max_images_also_in_train is not None:
        name, limit = "share of validation images also in training", gate.max_images_also_in_train
        checks.append(_overlap(name, "images_also_in_train", evaluation, limit))
    if gate.max_images_like_train is not None:
        checks += _look_alikes(evaluation, gate.max_images_like_train)
    if against is not None:
        checks.append(_against_champion(gate, against))
    return Decision(
        accepted=all(check.passed for check in checks),
        reason=_reason(checks, overlap_sentence(evaluation)),
        checks=tuple(checks),
        champion=champion,
    )


def _finite(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) else None


def _missing(value: object, what: str) -> str:
    return f"the evaluation holds no {what}" if value is None else f"{what} is {value!r}, not a finite number"


def _apart(value: float, other: float) -> tuple[str, str]:
    """Both numbers with enough digits to differ: never "0.95 is below the required 0.95"."""
    digits = next((n for n in (4, 6, 9) if f"{value:.{n}g}" != f"{other:.{n}g}"), 4)
    return f"{value:.{digits}g}", f"{other:.{digits}g}"


def _limit(
    name: str,
    metric: str,
    value: object,
    threshold: float,
    *,
    upper: bool = False,
    slice_name: str | None = None,
    questions: int | None = None,
) -> Check:
    """Return whether the value reaches a lower threshold, or with `upper` does not exceed it.

    questions: that the value stands on, where they are not all of the evaluation's.
    """
    number = _finite(value)
    if number is None:
        why, passed = _missing(value, metric if slice_name is None else f"{metric} of slice {slice_name!r}"), False
    else:
        passed = number <= threshold + ROUNDING if upper else number >= threshold - ROUNDING
        ours, other = _apart(number, threshold)
        verdict, bound = ("is within", "allowed") if upper else ("reaches", "required")
        if not passed:
            verdict = "exceeds" if upper else "is below"
        basis = "" if questions is None else f" ({questions:,} questions)"
        why = f"{name} {ours} {verdict} the {bound} {other}{basis}"
    return Check(
        name=name,
        metric=metric,
        slice=slice_name,
        value=number,
        threshold=threshold,
        is_upper=upper,
        questions=questions,
        passed=passed,
        why=why,
    )


def _slice_check(name: str, floor: float, slices: Mapping[str, Scores]) -> Check:
    if name in slices:
        result = slices[name]
        title = f"exact match of {name}"
        return _limit(title, "exact_match", result.exact_match, floor, slice_name=name, questions=result.questions)
    known = ", ".join(sorted(slices)) or "none"
    why = f"the evaluation has no slice {name!r}; its slices are: {known}"
    return Check(
        name=f"exact match of {name}", metric="exact_match", slice=name, threshold=floor, passed=False, why=why
    )


def _margins(gate: GateConfig) -> list[tuple[Baseline, float]]:
    margins: list[tuple[Baseline, float]] = []
    if gate.min_margin_over_chance is not None:
        margins.append(("chance", gate.min_margin_over_chance))
    if gate.min_margin_over_shuffled_image is not None:
        margins.append(("shuffled_image", gate.min_margin_over_shuffled_image))
    return margins


def _margin(key: Baseline, evaluation: Evaluation, gate: GateConfig, threshold: float) -> Check:
    """Exact match above a baseline: what the model knows beyond the trivial answer."""
    name, metric = f"margin over {BASELINE_NAMES[key]}", f"exact_match - {key}"
    counts = evaluation.paired.get(key)
    if counts is not None:
        tested = TestedDifference(name, metric, PairedCounts.model_validate(counts), threshold, gate.min_questions)
        return tested.check(f"{name} {{}} {{}} the required {threshold:.4g}", ("exceeds", "does not surely exceed"))
    control = evaluation.controls.get(key)
    of_control = control.exact_match if control else None
    exact_match, baseline = evaluation.exact_match, evaluation.chance if key == "chance" else of_control
    ours, other = _finite(exact_match), _finite(baseline)
    if ours is None or other is None:
        why = (
            _missing(exact_match, "exact_match")
            if ours is None
            else _missing(baseline, f"exact match of {BASELINE_NAMES[key]}")
        )
        return Check(name=name, metric=metric, threshold=threshold, passed=False, why=why)
    check = _limit(name, metric, ours - other, threshold)  # of a program of others, which leaves shares alone
    return check.model_copy(update={"why": f"{check.why}, by shares alone: the evaluation has no answers to compare"})


def _overlap(name: str, metric: str, counts: Evaluation | BenchmarkScores, threshold: float) -> Check:
    images, shared = _finite(counts.images), _finite(getattr(counts, metric.rpartition(".")[2]))
    share = shared / images if images and shared is not None else shared  # no images: none of them are shared
    return _limit(name, metric, share, threshold, upper=True)


def _look_alikes(evaluation: Evaluation, threshold: float) -> list[Check]:
    """Return checks of images that look like training images, for the validation split and for each benchmark.

    Benchmarks of lmms-eval have none: the evaluation does not see their images.
    """
    name, metric = "share of {} that look like training images", "images_like_train"
    benchmarks = {
        name: benchmark for name, benchmark in evaluation.benchmarks.items() if "images" in benchmark.model_fields_set
    }
    return [
        _overlap(name.format("validation images"), metric, evaluation, threshold),
        *(
            _overlap(name.format(f"images of {benchmark}"), f"benchmarks.{benchmark}.{metric}", counts, threshold)
            for benchmark, counts in sorted(benchmarks.items())
        ),
    ]


def _against_champion(gate: GateConfig, against: AgainstChampion) -> Check:
    champion, counts = against.champion, against.paired
    which = f"champion version {champion.version} (run {champion.run_id})"

    def check(passed: bool, why: str) -> Check:
        return Check(name="no regression", metric="exact_match - champion", passed=passed, why=why)

    if against.is_this_run:
        return check(False, f"{which} is this very run, and a model is not compared with itself")
    if gate.max_regression is None:
        return check(True, f"not compared with {which}: gate.max_regression is null")
    if counts is None:
        skip = gate.when_not_comparable == "skip"
        treated = "so the other checks alone decide" if skip else "and gate.when_not_comparable is reject"
        return check(skip, f"not comparable with {which}: {against.obstacle}, {treated}")
    margin = gate.margin(counts.questions)
    assert margin is not None
    tested = TestedDifference("no regression", "exact_match - champion", counts, -margin, gate.min_questions)
    auto = ", the smallest that this number of questions can detect" if gate.max_regression == "auto" else ""
    sentence = f"exact match {{}} against {which}{against.where} {{}} a drop of {margin:.4g}{auto}"
    return tested.check(sentence, ("rules out", "does not rule out"))


def _reason(checks: list[Check], overlap: str) -> str:
    failed = [check for check in checks if not check.passed]
    if failed:
        more = f" ({len(failed) - 1} more of {len(checks)} checks failed)" if len(failed) > 1 else ""
        return f"Rejected: {failed[0].why}{more}."
    notes = [check.why for check in checks if check.threshold is None or check.name in NOTED]
    first = f"all {len(checks)} checks passed" if len(checks) > 1 else checks[0].why
    return f"Accepted: {'; '.join([first, *notes, *filter(None, [overlap])])}."
