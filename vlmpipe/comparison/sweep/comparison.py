"""Variants of a sweep beside each other: scores with intervals, differences from the baseline, and hypotheses."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from vlmpipe.comparison.sweep.intervals import LEVEL, Resampled, pareto, resample
from vlmpipe.comparison.sweep.results import SweepResults, Training, read_results
from vlmpipe.records.sweep_comparison import Answer, ComparedVariant, Hypothesis, Measured, SweepComparison
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.evaluation.significance.bootstrap import MIN_GROUPS
from vlmpipe.trainer.evaluation.significance.slices import holm
from vlmpipe.trainer.records.sweep import Claim
from vlmpipe.trainer.storage import open_storage

SELECTIONS = ("mean_image_tokens", "exact_match_per_token", "target_kept", "query_sensitivity")


def compare_sweep(run_uri: str) -> SweepComparison:
    """Compare what the sweep in that run's folder has left, and write comparison.json.

    Raises DataError where no training is done, or no question was asked of all variants.
    """
    comparison = compared(read_results(run_uri))
    comparison.write(open_storage(run_uri))
    return comparison


def compared(results: SweepResults) -> SweepComparison:
    """The comparison of these results. Raises as `compare_sweep`."""
    sweep, done = results.sweep, [training for training in results.trainings if training.is_done]
    if not done:
        errors = list(dict.fromkeys(training.error for training in results.trainings))
        raise DataError(f"all {len(results.trainings)} trainings of the sweep failed: {errors[0]}")
    shared = sorted(set(done[0].scores).intersection(*(training.scores for training in done[1:])))
    if not shared:
        raise DataError(
            "the variants share no question",
            expected="variants that are evaluated on the same validation samples",
            fix="leave data.source, data.validation_fraction and evaluate.max_samples out of the sweep",
        )
    of_variant = {
        variant.name: [training for training in done if training.variant == variant.name] for variant in sweep.variants
    }
    scores = {
        name: [[training.scores[key] for key in shared] for training in trainings]
        for name, trainings in of_variant.items()
        if trainings
    }
    resampled = resample(scores, [done[0].image_groups.get(key[0], key[0]) for key in shared])
    variants = _variants(results, of_variant, resampled)
    notes = []
    if left := max(len(training.scores) for training in done) - len(shared):
        notes.append(f"{left:,} questions that not all variants were asked are left out")
    if not done[0].image_groups:
        notes.append("which questions share images is not known: samples are drawn in their place")
    if resampled.groups == 1:
        notes.append("all questions are about one image, which tells nothing of others")
    if any(len(trainings) == 1 for trainings in of_variant.values()):
        notes.append("a variant with one training has no verdict: its interval holds the chance of questions only")
    unseen = [
        variant.difference.could_see
        for variant in variants
        if variant.difference and variant.verdict == "no difference shown"
    ]
    if could_see := [difference for difference in unseen if difference is not None]:
        notes.append(
            f"where no difference is shown, one of {max(could_see):.3f} would have been in four of five such sweeps, "
            "before the correction for the number of variants"
        )
    return SweepComparison(
        metric=sweep.metric,
        baseline=sweep.baseline,
        questions=len(shared),
        variants=tuple(variants),
        hypotheses=tuple(_hypotheses(sweep.hypotheses, resampled)),
        job_s=results.job_s,
        train_s=sum(training.train_s for training in done),
        evaluate_s=sum(training.evaluate_s for training in done),
        notes=tuple(notes),
    )


def _variants(
    results: SweepResults, of_variant: dict[str, list[Training]], resampled: Resampled
) -> list[ComparedVariant]:
    baseline, known = results.sweep.baseline, resampled.means
    others = [name for name in known if name != baseline] if baseline in known else []
    p_corrected = holm({name: resampled.p_two_sided(name, baseline) for name in others})
    fronts = _fronts(of_variant, resampled)
    variants = []
    for variant in results.sweep.variants:
        name, trainings = variant.name, of_variant[variant.name]
        errors = tuple(
            training.error
            for training in results.trainings
            if training.variant == name and not training.is_done and not training.is_skipped
        )
        if not trainings:
            variants.append(
                ComparedVariant(name=name, values=variant.values, starts=0, errors=errors, verdict="failed")
            )
            continue
        difference = resampled.difference(name, baseline) if name in p_corrected else None
        starts = min(len(trainings), len(of_variant.get(baseline, ())))
        variants.append(
            ComparedVariant(
                name=name,
                values=variant.values,
                starts=len(trainings),
                errors=errors,
                score=resampled.score(name),
                difference=difference,
                p_corrected=p_corrected.get(name),
                verdict=_verdict(difference, p_corrected.get(name), starts, resampled.groups),
                selection=_selection(trainings),
                train_s=fmean(training.train_s for training in trainings),
                evaluate_s=fmean(training.evaluate_s for training in trainings),
                device_hours=fmean(training.device_hours for training in trainings),
                on_front=tuple(cost for cost, names in fronts.items() if name in names),
            )
        )
    return variants


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
    selections = {name: [training.selection(name) for training in trainings] for name in SELECTIONS}
    means = {
        name: fmean(value for value in values if value is not None)
        for name, values in selections.items()
        if any(value is not None for value in values)
    }
    return means or None


def _fronts(of_variant: dict[str, list[Training]], resampled: Resampled) -> dict[str, set[str]]:
    """By kind of cost, the variants at which no other has both a better score and a lower cost."""
    tokens, hours = dict[str, tuple[float, float]](), dict[str, tuple[float, float]]()
    for name, score in resampled.means.items():
        hours[name] = (fmean(training.device_hours for training in of_variant[name]), score)
        mean_tokens = [training.selection("mean_image_tokens") for training in of_variant[name]]
        if all(value is not None for value in mean_tokens):
            tokens[name] = (fmean(value for value in mean_tokens if value is not None), score)
    return {"image_tokens": pareto(tokens), "device_hours": pareto(hours)}


def _hypotheses(claims: Sequence[Claim], resampled: Resampled) -> list[Hypothesis]:
    """A claim against several variants holds where it holds against each: its p value is the largest of theirs."""
    p_values = {
        str(index): max(resampled.p_better(claim.variant, other, claim.margin) for other in claim.against)
        for index, claim in enumerate(claims)
        if {claim.variant, *claim.against} <= resampled.means.keys()
    }
    p_corrected = holm(p_values)
    hypotheses = []
    for index, claim in enumerate(claims):
        p = p_corrected.get(str(index))
        answer: Answer = "not measured"
        differences = tuple[Measured, ...]()
        if p is not None:
            differences = tuple(resampled.difference(claim.variant, other) for other in claim.against)
            is_refuted = any(difference.interval[1] < -claim.margin for difference in differences)
            has_starts = all(resampled.variants[name].starts > 1 for name in (claim.variant, *claim.against))
            shown: Answer = "supported" if p < LEVEL else "contradicted" if is_refuted else "not shown"
            answer = shown if has_starts and resampled.groups >= MIN_GROUPS else "not shown"
        hypotheses.append(Hypothesis(**claim.model_dump(), answer=answer, differences=differences, p_corrected=p))
    return hypotheses
