"""Laws of a learning curve, error = floor + scale x fall((samples / at) ^ exponent), fitted to many draws at once.

Which law a curve follows is not known, and laws that fit the same few points equally well differ beyond them. A law is
therefore drawn for each draw of the points: by how likely the points are under it, three forms being equally likely
before. Floor and scale are weighted least squares of the draw, at least 0, so that no fitted curve rises with samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlmpipe.records.learning_curve import Form
from vlmpipe.trainer.evaluation.significance.bootstrap import SEED, Float64Array

Int64Array = NDArray[np.int64]
# The forms are among those that Viering and Loog (2022, The Shape of Learning Curves: a Review) compare. Exponents of
# the power law: from nearly a logarithm to far steeper than curves of trained models (0.07 to 0.35 in Hestness et al.,
# 2017, Deep Learning Scaling is Predictable, Empirically; up to 1 by theory).
EXPONENTS: dict[Form, Float64Array] = {
    "power": np.geomspace(0.05, 1.5, 24),
    "logistic": np.array([0.5, 0.75, 1.0, 1.5, 2.0, 3.0]),
    "exponential": np.array([0.35, 0.5, 0.7, 1.0, 1.4]),
}
FALLS: dict[Form, Callable[[Float64Array], Float64Array]] = {  # from one, or from infinity, to zero
    "power": lambda ratio: 1 / ratio,
    "logistic": lambda ratio: 1 / (1 + ratio),
    "exponential": lambda ratio: np.exp(-ratio),
}
RATIOS: dict[Form, Callable[[Float64Array], Float64Array]] = {  # at which the fall is that; below 0 where it never is
    "power": lambda fall: 1 / fall,
    "logistic": lambda fall: 1 / fall - 1,
    "exponential": lambda fall: -np.log(fall),
}
PLACES = 5  # of `at`, from half the smallest number of samples to twice the largest


@dataclass(frozen=True)
class Shape:
    """A law without its floor and scale. at: the largest number of samples, where the form is a power."""

    form: Form
    exponent: float
    at: float

    def fall(self, samples: Float64Array) -> Float64Array:
        """The part of `scale` that is left after these samples."""
        return FALLS[self.form]((samples / self.at) ** self.exponent)

    def samples_for(self, fall: Float64Array) -> Float64Array:
        """The samples at which that part is left; infinite where none is to be left, 0 where more is there at none."""
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            samples: Float64Array = self.at * np.maximum(0.0, RATIOS[self.form](fall)) ** (1 / self.exponent)
        return np.where(fall <= 0, np.inf, samples)


@dataclass(frozen=True)
class Laws:
    """Drawn laws, `shapes[place]` of each draw. floor, scale, place: (draws,). likely: (shapes,), with the sum 1."""

    shapes: tuple[Shape, ...]
    likely: Float64Array
    place: Int64Array
    floor: Float64Array
    scale: Float64Array

    def errors(self, samples: float) -> Float64Array:
        """(draws,) error after training on that number of samples."""
        falls = np.array([shape.fall(np.array(samples)) for shape in self.shapes])
        errors: Float64Array = self.floor + self.scale * falls[self.place]
        return errors

    def samples_for(self, above_floor: Float64Array) -> Float64Array:
        """(draws,) samples at which the error is `above_floor` (draws,) over its floor; infinite where it never is."""
        samples = np.zeros(len(self.place))
        for place, shape in enumerate(self.shapes):
            drawn = self.place == place
            with np.errstate(divide="ignore", invalid="ignore"):
                samples[drawn] = shape.samples_for(above_floor[drawn] / self.scale[drawn])
        return np.where(above_floor <= 0, np.inf, np.where(self.scale == 0, 0.0, samples))


def shapes_of(samples: Float64Array) -> tuple[Shape, ...]:
    """The shapes that are fitted to points at these numbers of samples."""
    least, most = float(samples.min()), float(samples.max())
    places = np.geomspace(least / 2, 2 * most, PLACES).tolist()
    return tuple(
        Shape(form, exponent, at)
        for form, exponents in EXPONENTS.items()
        for exponent in exponents.tolist()
        for at in ([most] if form == "power" else places)
    )


def fit_laws(samples: Float64Array, errors: Float64Array, draws: Float64Array, variances: Float64Array) -> Laws:
    """Draw a law for each draw of the errors.

    Args:
        samples: (points,) training samples, at least two different numbers.
        errors: (points,) measured.
        draws: (draws, points) errors.
        variances: (points,) of the errors, apart from what all points share.
    """
    shapes = shapes_of(samples)
    weights = 1 / variances
    losses = np.array([fit_shape(shape, samples, errors[None], weights)[2][0] for shape in shapes])
    sizes = {form: sum(shape.form == form for shape in shapes) for form in EXPONENTS}
    likely = np.array([1 / sizes[shape.form] for shape in shapes]) * np.exp((losses.min() - losses) / 2)
    likely /= likely.sum()
    place = np.random.default_rng(SEED).choice(len(shapes), len(draws), p=likely)
    floor, scale = np.zeros(len(draws)), np.zeros(len(draws))
    for number in np.unique(place).tolist():
        drawn = place == number
        floor[drawn], scale[drawn], _ = fit_shape(shapes[number], samples, draws[drawn], weights)
    return Laws(shapes, likely, place, floor, scale)


def fit_shape(
    shape: Shape, samples: Float64Array, errors: Float64Array, weights: Float64Array
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Floor, scale and weighted square error of a shape: (draws,) each, for errors (draws, points)."""
    share, x = weights / weights.sum(), shape.fall(samples)
    mean, centred = errors @ share, share * (x - x @ share)
    scale = np.maximum(0.0, errors @ centred / (centred @ x))
    floor = mean - scale * (x @ share)
    through = np.maximum(0.0, errors @ (share * x) / (x @ (share * x)))  # with a floor of 0
    scale = np.where(floor < 0, through, scale)
    floor = np.maximum(0.0, floor)
    return floor, scale, np.square(errors - floor[:, None] - scale[:, None] * x) @ weights
