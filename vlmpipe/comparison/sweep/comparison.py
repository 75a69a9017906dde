"""Variants of a sweep beside each other: scores with intervals, differences from the baseline, and hypotheses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from vlmpipe.comparison.sweep.intervals import LEVEL, Measured, Resampled, holm, pareto, resample
from vlmpipe.comparison.sweep.results import SweepResults, Training, read_results
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.evaluation.significance.bootstrap import MIN_GROUPS
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import write_record

FILE = "comparison.json"
SELECTIONS = ("mean_image_tokens", "exact_match_per_token", "target_kept", "query_sensitivity")
Answer = Literal["supported", "contradicted", "not shown", "not measured"]


@dataclass(frozen=True)
class ComparedVariant:
    """A variant. `score` is None where no training of it is done; differences are None of the baseline too.

    p_corrected: of a difference from the baseline, corrected for the number of variants.
    selection: means of evaluate.json's section relevance. seconds: means of a training, and of its evaluation.
    device_hours: of one training with its evaluation; GPUs, or processes on the CPU.
    on_front: the costs (image_tokens, device_hours) at which no other variant is better.
    """

    name: str
    values: dict[str, Any]
    starts: int
    errors: tuple[str, ...]
    score: Measured | None = None
    difference: Measured | None = None
    p_corrected: float | None = None
    verdict: str = ""
    selection: dict[str, float] | None = None
    train_s: float = 0.0
    evaluate_s: float = 0.0
    device_hours: float = 0.0
    on_front: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hypothesis:
    """A claim and what the sweep says of it. `differences` are those from each variant of `against`."""

    claim: str
    variant: str
    against: tuple[str, ...]
    margin: float
    answer: Answer
    differences: tuple[Measured, ...]
    p_corrected: float | None


@dataclass(frozen=True)
class SweepComparison:
    """job_s: seconds of all jobs together; train_s and evaluate_s are the parts that trained and evaluated."""

    metric: str
    baseline: str
    questions: int
    variants: tuple[ComparedVariant, ...]
    hypotheses: tuple[Hypothesis, ...]
    job_s: float
    train_s: float
    evaluate_s: float
    notes: tuple[str, ...]

    @property
    def best(self) -> str:
        return max((one for one in self.variants if one.score), key=_value).name

    @property
    def failed(self) -> int:
        """Trainings that failed."""
        return sum(len(one.errors) for one in self.variants)

    @property
    def share_outside(self) -> float | None:
        """Share of the jobs' time that neither trained nor evaluated; None where it was not measured, and in a sweep
        that was continued, whose jobs have the time of their last attempt alone."""
        share = 1 - (self.train_s + self.evaluate_s) / self.job_s if self.job_s else -1.0
        return share if share >= 0 else None

    @property
    def sentence(self) -> str:
        best = max((one for one in self.variants if one.score), key=_value)
        assert best.score
        low, high = best.score.interval
        failed = f"; {self.failed} trainings failed" if self.failed else ""
        text = f"best of {len(self.variants)} variants: {best.name}, {self.metric} {best.score.value:.3f}"
        return f"{text} ({low:.3f} to {high:.3f}){failed}"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "best": self.best, "failed": self.failed, "share_outside": self.share_outside}


def _value(variant: ComparedVariant) -> float:
    return variant.score.value if variant.score else -1.0


def compare_sweep(run_uri: str) -> SweepComparison:
    """Compare what the sweep in that run's folder has left, and write comparison.json.

    Raises DataError where no training is done, or no question was asked of all variants.
    """
    found = compared(read_results(run_uri))
    write_record(open_storage(run_uri), FILE, found.as_json(), indent=1)
    return found


def compared(results: SweepResults) -> SweepComparison:
    """The comparison of these results. Raises as `compare_sweep`."""
    content, done = results.content, [one for one in results.trainings if one.is_done]
    if not done:
        errors = list(dict.fromkeys(one.error for one in results.trainings))
        raise DataError(f"all {len(results.trainings)} trainings of the sweep failed: {errors[0]}")
    shared = sorted(set(done[0].scores).intersection(*(one.scores for one in done[1:])))
    if not shared:
        raise DataError(
            "the variants share no question",
            expected="variants that are evaluated on the same validation samples",
            fix="leave data.source, data.validation_fraction and evaluate.max_samples out of the sweep",
        )
    of_variant = {one["name"]: [each for each in done if each.variant == one["name"]] for one in content["variants"]}
    scores = {
        name: [[one.scores[key] for key in shared] for one in trainings]
        for name, trainings in of_variant.items()
        if trainings
    }
    resampled = resample(scores, [done[0].image_groups.get(key[0], key[0]) for key in shared])
    variants = _variants(results, of_variant, resampled)
    notes = []
    if left := max(len(one.scores) for one in done) - len(shared):
        notes.append(f"{left:,} questions that not all variants were asked are left out")
    if not done[0].image_groups:
        notes.append("which questions share images is not known: samples are drawn in their place")
    if resampled.groups == 1:
        notes.append("all questions are about one image, which tells nothing of others")
    if any(len(trainings) == 1 for trainings in of_variant.values()):
        notes.append("a variant with one training has no verdict: its interval holds the chance of questions only")
    unseen = [one.difference.could_see for one in variants if one.difference and one.verdict == "no difference shown"]
    if could_see := [one for one in unseen if one is not None]:
        notes.append(
            f"where no difference is shown, one of {max(could_see):.3f} would have been in four of five such sweeps, "
            "before the correction for the number of variants"
        )
    return SweepComparison(
        metric=content["metric"],
        baseline=content["baseline"],
        questions=len(shared),
        variants=tuple(variants),
        hypotheses=tuple(_hypotheses(content["hypotheses"], resampled)),
        job_s=results.job_s,
        train_s=sum(one.train_s for one in done),
        evaluate_s=sum(one.evaluate_s for one in done),
        notes=tuple(notes),
    )


def _variants(
    results: SweepResults, of_variant: dict[str, list[Training]], resampled: Resampled
) -> list[ComparedVariant]:
    baseline, known = results.content["baseline"], resampled.means
    others = [name for name in known if name != baseline] if baseline in known else []
    p_corrected = holm({name: resampled.p_two_sided(name, baseline) for name in others})
    fronts = _fronts(of_variant, resampled)
    found = []
    for one in results.content["variants"]:
        name, trainings = one["name"], of_variant[one["name"]]
        errors = tuple(each.error for each in results.trainings if each.variant == name and not each.is_done)
        if not trainings:
            found.append(ComparedVariant(name, one["values"], 0, errors, verdict="failed"))
            continue
        difference = resampled.difference(name, baseline) if name in p_corrected else None
        starts = min(len(trainings), len(of_variant.get(baseline, ())))
        found.append(
            ComparedVariant(
                name=name,
                values=one["values"],
                starts=len(trainings),
                errors=errors,
                score=resampled.score(name),
                difference=difference,
                p_corrected=p_corrected.get(name),
                verdict=_verdict(difference, p_corrected.get(name), starts, resampled.groups),
                selection=_selection(trainings),
                train_s=fmean(each.train_s for each in trainings),
                evaluate_s=fmean(each.evaluate_s for each in trainings),
                device_hours=fmean(each.device_hours for each in trainings),
                on_front=tuple(cost for cost, names in fronts.items() if name in names),
            )
        )
    return found


def _verdict(difference: Measured | None, p_corrected: float | None, starts: int, images: int) -> str:
    """How the variant compares with the baseline. With one training of a side nothing tells it from another start."""
    if difference is None or p_corrected is None:
        return ""
    if images < MIN_GROUPS:
        return "too few images: no verdict"
    if starts < 2:
        return "one start: no verdict"
    if p_corrected >= LEVEL:
        return "no difference shown"
    return "better" if difference.value > 0 else "worse"


def _selection(trainings: Sequence[Training]) -> dict[str, float] | None:
    found = {name: [one.selection(name) for one in trainings] for name in SELECTIONS}
    means = {
        name: fmean(one for one in values if one is not None)
        for name, values in found.items()
        if any(one is not None for one in values)
    }
    return means or None


def _fronts(of_variant: dict[str, list[Training]], resampled: Resampled) -> dict[str, set[str]]:
    """By kind of cost, the variants at which no other has both a better score and a lower cost."""
    tokens, hours = dict[str, tuple[float, float]](), dict[str, tuple[float, float]]()
    for name, score in resampled.means.items():
        hours[name] = (fmean(one.device_hours for one in of_variant[name]), score)
        kept = [one.selection("mean_image_tokens") for one in of_variant[name]]
        if all(one is not None for one in kept):
            tokens[name] = (fmean(one for one in kept if one is not None), score)
    return {"image_tokens": pareto(tokens), "device_hours": pareto(hours)}


def _hypotheses(claims: Sequence[dict[str, Any]], resampled: Resampled) -> list[Hypothesis]:
    """A claim against several variants holds where it holds against each: its p value is the largest of theirs."""
    p_values = {
        str(number): max(resampled.p_better(one["variant"], other, one["margin"]) for other in one["against"])
        for number, one in enumerate(claims)
        if {one["variant"], *one["against"]} <= resampled.means.keys()
    }
    p_corrected = holm(p_values)
    found = []
    for number, one in enumerate(claims):
        p = p_corrected.get(str(number))
        answer: Answer = "not measured"
        differences = tuple[Measured, ...]()
        if p is not None:
            differences = tuple(resampled.difference(one["variant"], other) for other in one["against"])
            is_refuted = any(each.interval[1] < -one["margin"] for each in differences)
            has_starts = all(resampled.variants[name].starts > 1 for name in (one["variant"], *one["against"]))
            shown: Answer = "supported" if p < LEVEL else "contradicted" if is_refuted else "not shown"
            answer = shown if has_starts and resampled.groups >= MIN_GROUPS else "not shown"
        found.append(
            Hypothesis(one["claim"], one["variant"], tuple(one["against"]), one["margin"], answer, differences, p)
        )
    return found
