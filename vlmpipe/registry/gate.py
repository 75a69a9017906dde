"""The gate: decides by recorded numbers whether a new model may replace the champion.

Every requirement becomes one `Check` with its value, its threshold and a sentence that explains it. A required number
that the evaluation lacks is a failed check.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vlmpipe.config.sections.output import GateConfig
from vlmpipe.registry.paired_bootstrap import PairedAnswers
from vlmpipe.trainer.config.base import Section
from vlmpipe.trainer.config.benchmarks import TITLES
from vlmpipe.trainer.evaluation.metrics import overlap_sentence

# A margin is a difference of two rounded shares: 0.3 - 0.1 must reach a threshold of 0.2.
ROUNDING = 1e-9
SCORE_NAMES = {
    "vqa_accuracy": "VQA accuracy",
    "anls": "ANLS",
    "cider_d": "CIDEr-D",
    "preference_accuracy": "preference accuracy",
}


class Check(Section):
    """One requirement and its result. `value` and `threshold` are None where there is no number."""

    name: str
    metric: str
    slice: str | None = None
    value: float | None = None
    threshold: float | None = None
    is_upper: bool = False  # the threshold: the value may not exceed it
    interval: tuple[float, float] | None = None  # of the difference from the champion, 95 %
    passed: bool
    why: str


class Champion(Section):
    """The model in use: its registry version, run and held-out exact match."""

    version: int
    run_id: str
    exact_match: float | None = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Champion:
        exact_match = _finite(record.get("exact_match"))
        return cls(version=record["version"], run_id=record["run_id"], exact_match=exact_match)


class Decision(Section):
    """The gate's answer, written to `decision.json`; its numbers are finite."""

    accepted: bool
    reason: str
    checks: tuple[Check, ...]
    champion: Champion | None = None
    run_sha256: str = ""  # of the run.json that the run had, without its submission


def decide(
    evaluation: Mapping[str, Any],
    gate: GateConfig,
    champion: Mapping[str, Any] | None = None,
    shared: PairedAnswers | None = None,
) -> Decision:
    """Check `evaluation` against `gate` and, where it is fair, against the champion.

    Args:
        evaluation: `evaluate.json` of the run, with `run_id` added.
        gate: the thresholds.
        champion: `version`, `run_id`, `exact_match` and `held_out_sha256` of the model in use; None if there is none.
        shared: results of both on their common questions, which decide where the held-out questions differ, and the
            interval of the difference.
    """
    exact_match = evaluation.get("exact_match")
    checks = [_limit("exact match", "exact_match", exact_match, gate.min_exact_match)]
    if gate.max_loss is not None:
        checks.append(_limit("loss", "loss", evaluation.get("loss"), gate.max_loss, upper=True))
    for metric, floor in sorted(gate.min_scores.items()):
        checks.append(_limit(SCORE_NAMES[metric], metric, evaluation.get(metric), floor))
    slices = evaluation.get("slices") or {}
    checks += [_slice_check(name, floor, slices) for name, floor in sorted(gate.per_slice.items())]
    found = {name: benchmark.get("scores") or {} for name, benchmark in (evaluation.get("benchmarks") or {}).items()}
    checks += [
        _limit(
            f"{TITLES.get(metric, metric)} of {name}",
            f"benchmarks.{name}.{metric}",
            found.get(name, {}).get(metric),
            floor,
        )
        for name, floors in sorted(gate.benchmarks.items())
        for metric, floor in sorted(floors.items())
    ]
    if gate.min_margin_over_chance is not None:
        checks.append(_margin("chance", exact_match, evaluation.get("chance"), gate.min_margin_over_chance))
    if gate.min_margin_over_shuffled_image is not None:
        shuffled = (evaluation.get("controls") or {}).get("shuffled_image") or {}
        margin = gate.min_margin_over_shuffled_image
        checks.append(_margin("shuffled image", exact_match, shuffled.get("exact_match"), margin))
    if gate.max_mean_image_tokens is not None:
        tokens = (evaluation.get("relevance") or {}).get("mean_image_tokens")
        most = gate.max_mean_image_tokens
        checks.append(_limit("tokens an image", "relevance.mean_image_tokens", tokens, most, upper=True))
    if gate.max_images_also_in_train is not None:
        checks.append(_overlap(evaluation, gate.max_images_also_in_train))
    if champion is not None:
        checks.append(_against_champion(evaluation, gate, champion, shared))
    return Decision(
        accepted=all(check.passed for check in checks),
        reason=_reason(checks, overlap_sentence(evaluation)),
        checks=tuple(checks),
        champion=Champion.from_record(champion) if champion is not None else None,
    )


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _missing(value: Any, what: str) -> str:
    return f"the evaluation holds no {what}" if value is None else f"{what} is {value!r}, not a finite number"


def _apart(value: float, other: float) -> tuple[str, str]:
    """Both numbers with enough digits to differ: never "0.95 is below the required 0.95"."""
    digits = next((n for n in (4, 6, 9) if f"{value:.{n}g}" != f"{other:.{n}g}"), 4)
    return f"{value:.{digits}g}", f"{other:.{digits}g}"


def _limit(
    name: str, metric: str, value: Any, threshold: float, *, upper: bool = False, slice_name: str | None = None
) -> Check:
    """Whether the value reaches a lower threshold, or with `upper` does not exceed it."""
    number = _finite(value)
    if number is None:
        why, passed = _missing(value, metric if slice_name is None else f"{metric} of slice {slice_name!r}"), False
    else:
        passed = number <= threshold + ROUNDING if upper else number >= threshold - ROUNDING
        own, other = _apart(number, threshold)
        verdict, bound = ("is within", "allowed") if upper else ("reaches", "required")
        if not passed:
            verdict = "exceeds" if upper else "is below"
        why = f"{name} {own} {verdict} the {bound} {other}"
    return Check(
        name=name,
        metric=metric,
        slice=slice_name,
        value=number,
        threshold=threshold,
        is_upper=upper,
        passed=passed,
        why=why,
    )


def _slice_check(name: str, floor: float, slices: Mapping[str, Any]) -> Check:
    if name in slices:
        return _limit(f"exact match of {name}", "exact_match", slices[name].get("exact_match"), floor, slice_name=name)
    known = ", ".join(sorted(slices)) or "none"
    why = f"the evaluation has no slice {name!r}; its slices are: {known}"
    return Check(
        name=f"exact match of {name}", metric="exact_match", slice=name, threshold=floor, passed=False, why=why
    )


def _margin(over: str, exact_match: Any, baseline: Any, threshold: float) -> Check:
    """Exact match minus `baseline`: what the model knows beyond the trivial answer."""
    name, metric = f"margin over {over}", f"exact_match - {over.replace(' ', '_')}"
    own, other = _finite(exact_match), _finite(baseline)
    if own is None or other is None:
        why = _missing(exact_match, "exact_match") if own is None else _missing(baseline, f"exact match of {over}")
        return Check(name=name, metric=metric, threshold=threshold, passed=False, why=why)
    return _limit(name, metric, own - other, threshold)


def _overlap(evaluation: Mapping[str, Any], threshold: float) -> Check:
    images, shared = (_finite(evaluation.get(name)) for name in ("images", "images_also_in_train"))
    share = shared / images if images and shared is not None else shared  # no images: none of them are shared
    return _limit("share of held-out images also in training", "images_also_in_train", share, threshold, upper=True)


def _against_champion(
    evaluation: Mapping[str, Any], gate: GateConfig, champion: Mapping[str, Any], shared: PairedAnswers | None
) -> Check:
    which = f"champion version {champion['version']} (run {champion['run_id']})"
    own, best = _finite(evaluation.get("exact_match")), _finite(champion.get("exact_match"))

    interval = shared.interval if shared else None

    def check(passed: bool, why: str, threshold: float | None = None) -> Check:
        return Check(
            name="no regression", metric="exact_match", value=own, threshold=threshold, interval=interval,
            passed=passed, why=why,
        )  # fmt: skip

    if evaluation.get("run_id") == champion["run_id"]:
        return check(False, f"{which} is this very run, and a model is not compared with itself")
    if gate.max_regression is None:
        return check(True, f"not compared with {which}: gate.max_regression is null")
    obstacle, where = _not_comparable(evaluation, champion), ""
    if obstacle and shared:
        own, best, obstacle = shared.exact_match, shared.champion, ""
        where = f", on the {shared.questions} held-out questions that both were asked"
    if obstacle or best is None:
        skip = gate.when_not_comparable == "skip"
        treated = "so the other checks alone decide" if skip else "and gate.when_not_comparable is reject"
        return check(skip, f"not comparable with {which}: {obstacle}, {treated}")
    if own is None:
        return check(False, _missing(evaluation.get("exact_match"), "exact_match"), best)
    least = best - gate.max_regression
    passed = own >= least - ROUNDING
    sure = f"; difference {interval[0]:+.4f} to {interval[1]:+.4f} (95 %, paired bootstrap)" if interval else ""
    if gate.regression_by == "interval":
        if not interval:
            return check(False, f"{which} has left no predictions, which gate.regression_by: interval needs", least)
        passed = interval[0] >= -gate.max_regression - ROUNDING
    (shown, other), verdict = _apart(own, best), "holds against" if passed else "falls short of"
    allowed = f" with an allowed drop of {gate.max_regression:.4g}" if gate.max_regression else ""
    return check(passed, f"exact match {shown} {verdict} {other} of {which}{allowed}{where}{sure}", least)


def _not_comparable(evaluation: Mapping[str, Any], champion: Mapping[str, Any]) -> str:
    if _finite(champion.get("exact_match")) is None:
        return "its exact match is not recorded"
    own, other = evaluation.get("held_out_sha256"), champion.get("held_out_sha256")
    if not own or not other:
        return "it is not recorded which held-out questions both were asked"
    return "" if own == other else "it was evaluated on other held-out questions"


def _reason(checks: list[Check], overlap: str) -> str:
    failed = [check for check in checks if not check.passed]
    if failed:
        more = f" ({len(failed) - 1} more of {len(checks)} checks failed)" if len(failed) > 1 else ""
        return f"Rejected: {failed[0].why}{more}."
    notes = [check.why for check in checks if check.threshold is None]  # passed without a comparison: say so
    first = f"all {len(checks)} checks passed" if len(checks) > 1 else checks[0].why
    return f"Accepted: {'; '.join([first, *notes, *filter(None, [overlap])])}."
