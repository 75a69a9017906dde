"""The learning curve of a sweep over shares of the training samples: the law, its interval, and what it answers.

Draws of each share's score are those of the sweep's comparison: questions by image, the same for all shares, and an
error for the starts beyond what questions explain, of Student's distribution as few starts tell little of it. A law is
fitted to each draw; an interval holds 80 % of them. The check predicts a score on the questions that the smaller shares
were asked: what their draws share is left out of it, and the chance of the measured score itself is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from vlmpipe.comparison.curve.law import Laws, fit_laws, fit_shape
from vlmpipe.comparison.sweep.intervals import resample
from vlmpipe.comparison.sweep.results import SweepResults, Training
from vlmpipe.records.learning_curve import Answer, Between, CurvePoint, Law, LearningCurve, Prediction, TrainingCost
from vlmpipe.trainer.evaluation.significance.bootstrap import MIN_GROUPS, SEED, Float64Array, unbiased

Int64Array = NDArray[np.int64]
DRAWS = 2000
ENDS = (0.1, 0.9)  # of an interval of 80 %
MIN_POINTS = 3  # as many as the law has parameters
VISIBLE_ERRORS = 2.8  # standard errors of a difference that a test at 5 % shows in four of five cases
FARTHEST = 10.0  # times the largest number of samples: the law is not read beyond


@dataclass(frozen=True)
class Points:
    """Scores of shares, fewest samples first.

    draws: (draws, shares) scores if other questions and other starts were drawn.
    own_draws: (draws, shares) the same without what questions change equally in all shares.
    own_error: (shares,) standard error of the mean, without it too.
    start_error: (shares,) standard error of a single training by its start.
    freedom: degrees of freedom of the start errors; 0 where no share has two starts.
    starts: (shares,) trainings that are done.
    """

    names: tuple[str, ...]
    samples: Float64Array
    means: Float64Array
    draws: Float64Array
    own_draws: Float64Array
    own_error: Float64Array
    start_error: Float64Array
    starts: Int64Array
    freedom: int
    questions: int
    images: int
    visible: float | None  # smallest difference of the two largest shares that would be seen

    def some(self, places: Sequence[int]) -> Points:
        """Return these points alone."""
        columns = {name: getattr(self, name)[:, places] for name in ("draws", "own_draws")}
        of_shares = ("samples", "means", "own_error", "start_error", "starts")
        columns |= {name: getattr(self, name)[places] for name in of_shares}
        return replace(self, names=tuple(self.names[place] for place in places), **columns)

    @property
    def variances(self) -> Float64Array:
        """(shares,) variances of the means, apart from what all share; of equal scores, that of a rounding."""
        variances: Float64Array = self.own_error**2 + (0.5 / self.questions) ** 2
        return variances


def points_of(trainings: Mapping[str, Sequence[Training]], samples: Mapping[str, float]) -> Points:
    """The points of shares that have a score.

    Args:
        trainings: by variant, those that are done, at least one each, all asked the same questions.
        samples: training samples by variant.
    """
    names = sorted(trainings, key=lambda name: samples[name])
    every = [training for name in names for training in trainings[name]]
    keys = sorted(set(every[0].scores).intersection(*(training.scores for training in every[1:])))
    scores = {name: [[training.scores[key] for key in keys] for training in trainings[name]] for name in names}
    resampled = resample(scores, [every[0].image_groups.get(key[0], key[0]) for key in keys], DRAWS)
    variants = [resampled.variants[name] for name in names]
    means = np.array([variant.mean for variant in variants])
    of_training = np.array([variant.starts_variance * variant.starts for variant in variants])  # of a single training
    several = np.array([variant.starts > 1 for variant in variants])
    # Few starts tell little of their spread: half of it is that of all shares.
    of_one = (
        np.where(several, (of_training + of_training[several].mean()) / 2, of_training[several].mean())
        if several.any()
        else of_training
    )
    wider = unbiased(resampled.groups) if resampled.groups > 1 else 1.0
    asked = wider * (np.stack([variant.draws for variant in variants], axis=1) - means)
    unshared = (asked - asked.mean(1, keepdims=True)) * np.sqrt(len(names) / max(1, len(names) - 1))
    starts = np.array([variant.starts for variant in variants])
    error, freedom = np.sqrt(of_one / starts), int((starts - 1).sum())
    generator = np.random.default_rng(SEED)
    by_starts = generator.normal(size=asked.shape) * error
    visible = float(np.std((asked + by_starts)[:, -1] - (asked + by_starts)[:, -2])) if len(names) > 1 else None
    by_starts = by_starts * _widened(generator, freedom, DRAWS)[:, None]
    return Points(
        names=tuple(names),
        samples=np.array([samples[name] for name in names]),
        means=means,
        draws=means + asked + by_starts,
        own_draws=means + unshared + by_starts,
        own_error=np.sqrt(unshared.var(0) + error**2),
        start_error=np.sqrt(of_one),
        starts=starts,
        freedom=freedom,
        questions=len(keys),
        images=resampled.groups,
        visible=None if visible is None else VISIBLE_ERRORS * visible,
    )


def _widened(generator: np.random.Generator, freedom: int, draws: int) -> Float64Array:
    """(draws,) factors that make normal errors Student's: all shares have one estimate of the spread of starts."""
    return np.sqrt(freedom / generator.chisquare(freedom, draws)) if freedom else np.ones(draws)


def curve_of(
    results: SweepResults, samples: Mapping[str, float], epochs: int, cost: TrainingCost | None
) -> LearningCurve:
    """The learning curve of these results, at least one training done.

    Args:
        samples: training samples by variant.
    """
    sweep = results.sweep
    done = {
        name: [done for done in results.trainings if done.variant == name and done.is_done] for name in sweep.shares
    }
    points = points_of({name: trainings for name, trainings in done.items() if trainings}, samples)
    baseline = _baseline(done, sweep.metric)
    low = np.quantile(points.draws, ENDS[0], axis=0)
    at_baseline = {
        name for name, end in zip(points.names, low, strict=True) if baseline is not None and end <= baseline
    }
    above = [place for place, name in enumerate(points.names) if name not in at_baseline]
    fitted = points.some(above)
    has_points = len(set(fitted.samples.tolist())) >= MIN_POINTS
    shown = []
    for name, share in sorted(sweep.shares.items(), key=lambda item: samples[item[0]]):
        of_share = [training for training in results.trainings if training.variant == name]
        score = _between(points.draws[:, points.names.index(name)]) if name in points.names else None
        mean = float(points.means[points.names.index(name)]) if score else 0.0
        shown.append(
            CurvePoint(
                variant=name,
                share=share,
                samples=samples[name],
                starts=len(done[name]),
                skipped=sum(training.is_skipped for training in of_share),
                errors=tuple(training.error for training in of_share if training.error and not training.is_skipped),
                score=score and score.model_copy(update={"value": mean}),
                at_baseline=name in at_baseline,
                fitted=has_points and name in fitted.names,
                train_s=fmean(training.train_s for training in done[name]) if done[name] else 0.0,
            )
        )
    curve = LearningCurve(
        metric=sweep.metric,
        goal=sweep.goal,
        answer="too few points",
        questions=points.questions,
        images=points.images,
        epochs=epochs,
        baseline=baseline,
        points=tuple(shown),
        visible=points.visible,
        cost=cost,
        notes=tuple(_notes(points, shown, at_baseline)),
    )
    if points.images < MIN_GROUPS:
        return curve.model_copy(update={"answer": "too few images", "visible": None})
    if not has_points:
        few = len(set(points.samples.tolist())) < MIN_POINTS
        return curve.model_copy(update={"answer": "too few points" if few else "nothing learned"})
    return _answered(curve, fitted)


def _answered(curve: LearningCurve, points: Points) -> LearningCurve:
    """The curve with the law that fits these points, and what it answers."""
    gain = points.draws[:, -1] - points.draws[:, 0]
    if np.quantile(gain, ENDS[0]) <= 0:
        return curve.model_copy(update={"answer": "flat", "checked": _checked(points)})
    laws, largest = fitted_laws(points), float(points.samples[-1])
    needed = np.maximum(laws.samples_for(1 - curve.goal - laws.floor), points.samples[0])
    ceiling, number = _between(1 - laws.floor), _between(needed)
    middle = float(np.median(needed))
    answer: Answer = "needs"
    if not np.isfinite(middle):
        answer = "above the ceiling"
    elif middle > FARTHEST * largest:
        answer = "too far"
    elif middle <= largest:
        answer = "reached"
    visible = np.full(len(needed), points.visible)
    around = np.geomspace(points.samples[0], FARTHEST * largest, 41)
    return curve.model_copy(
        update={
            "answer": answer,
            "law": _likeliest(laws, points),
            "needed": number if answer in ("needs", "reached") else None,
            "ceiling": ceiling,
            "noise_from": float(np.median(np.maximum(laws.samples_for(visible), points.samples[0]))),
            "checked": _checked(points),
            "predictions": tuple(predicted(laws, points, float(samples)) for samples in around),
        }
    )


def fitted_laws(points: Points) -> Laws:
    """A law for each draw of these points."""
    return fit_laws(points.samples, 1 - points.means, 1 - points.draws, points.variances)


def _likeliest(laws: Laws, points: Points) -> Law:
    """The most likely law, fitted to the means."""
    shape = laws.shapes[int(np.argmax(laws.likely))]
    floor, scale, _ = fit_shape(shape, points.samples, 1 - points.means[None], 1 / points.variances)
    return Law(form=shape.form, floor=float(floor[0]), scale=float(scale[0]), exponent=shape.exponent, at=shape.at)


def predicted(laws: Laws, points: Points, samples: float, *, starts: int = 1) -> Prediction:
    """The mean score of `starts` trainings on that number of samples, with its interval."""
    return _prediction(laws, points, samples, points.start_error[-1] / np.sqrt(starts))


def hidden(points: Points, samples: float, *, starts: int) -> Prediction:
    """The measured mean score of `starts` trainings on that number of samples, on the questions of these points."""
    laws = fit_laws(points.samples, 1 - points.means, 1 - points.own_draws, points.variances)
    of_questions = points.own_error[-1] ** 2 - points.start_error[-1] ** 2 / points.starts[-1]
    error = float(np.sqrt(max(0.0, of_questions) + points.start_error[-1] ** 2 / starts))
    return _prediction(laws, points, samples, error)


def _prediction(laws: Laws, points: Points, samples: float, error: float) -> Prediction:
    """The score on that number of samples by these laws, measured with that standard error."""
    generator, scores = np.random.default_rng(SEED + 1), 1 - laws.errors(samples)
    spread = generator.normal(size=len(scores)) * _widened(generator, points.freedom, len(scores)) * error
    score = _between(np.clip(scores + spread, 0.0, 1.0))
    return Prediction(samples=samples, score=score.model_copy(update={"value": float(np.median(scores))}))


def _checked(points: Points) -> Prediction | None:
    """The largest share as the smaller ones predict it; None where they are too few."""
    smaller = [place for place, samples in enumerate(points.samples) if samples < points.samples[-1]]
    if len(set(points.samples[smaller].tolist())) < MIN_POINTS:
        return None
    known = points.some(smaller)
    largest = hidden(known, float(points.samples[-1]), starts=int(points.starts[-1]))
    return largest.model_copy(update={"measured": float(points.means[-1])})


def _between(values: Float64Array) -> Between:
    low, middle, high = (float(end) for end in np.quantile(values, (ENDS[0], 0.5, ENDS[1]), method="nearest"))
    return Between(value=middle, low=low, high=high if np.isfinite(high) else None)


def _baseline(done: Mapping[str, Sequence[Training]], metric: str) -> float | None:
    """The majority baseline's exact match; None for other metrics, of which it is not measured."""
    measured = [training.evaluation.chance for trainings in done.values() for training in trainings]
    baselines = [baseline for baseline in measured if baseline is not None]
    return max(baselines) if baselines and metric == "exact_match" else None


def _notes(points: Points, shown: Sequence[CurvePoint], at_baseline: set[str]) -> list[str]:
    notes = []
    if at_baseline:
        names = ", ".join(f"{100 * point.share:g} %" for point in shown if point.variant in at_baseline)
        notes.append(f"the law is not fitted to shares that are not above the majority baseline: {names}")
    if any(point.starts == 1 and not point.skipped for point in shown):
        notes.append("a share with one training: intervals hold less of the chance of starts than there is")
    if skipped := sum(point.skipped for point in shown):
        notes.append(f"{skipped} further starts of shares at the majority baseline were not trained")
    if missing := [f"{100 * point.share:g} %" for point in shown if point.score is None]:
        notes.append(f"no training is done of the shares {', '.join(missing)}")
    return notes
