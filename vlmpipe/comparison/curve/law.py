"""The power law of a learning curve, error = floor + scale x samples ^ -exponent, fitted to many draws at once.

For each exponent of a grid, floor and scale are weighted least squares within their bounds; the exponent with the
smallest error is taken. Floor and scale are at least 0, so that no fitted curve rises with more samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vlmpipe.trainer.evaluation.significance.bootstrap import Float64Array

# From nearly a logarithm to far steeper than curves of trained models (0.07 to 0.35 in Hestness et al., 2017, Deep
# Learning Scaling is Predictable, Empirically; up to 1 by theory).
EXPONENTS: Float64Array = np.geomspace(0.05, 1.5, 48)


@dataclass(frozen=True)
class PowerLaws:
    """Fitted curves, one of each draw. All arrays are (draws,)."""

    floor: Float64Array
    scale: Float64Array
    exponent: Float64Array

    def errors(self, samples: float) -> Float64Array:
        """(draws,) error after training on that number of samples."""
        errors: Float64Array = self.floor + self.scale * samples**-self.exponent
        return errors

    def samples_for(self, above_floor: Float64Array) -> Float64Array:
        """(draws,) samples at which the error is `above_floor` (draws,) over its floor; infinite where it never is."""
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            samples = (self.scale / above_floor) ** (1 / self.exponent)
        reached: Float64Array = np.where(above_floor <= 0, np.inf, samples)
        return reached


def fit_power_laws(samples: Float64Array, errors: Float64Array, weights: Float64Array) -> PowerLaws:
    """Fit a curve to each draw.

    Args:
        samples: (points,) training samples, at least two different numbers.
        errors: (draws, points) error of each draw.
        weights: (points,) inverse variances of the errors.
    """
    share = weights / weights.sum()
    best = np.full(len(errors), np.inf)
    floor, scale, exponent = (np.zeros(len(errors)) for _ in range(3))
    mean = errors @ share
    for power in EXPONENTS:
        x = (samples / samples.max()) ** -power
        centred = share * (x - x @ share)
        slope = np.maximum(0.0, errors @ centred / (centred @ x))
        constant = mean - slope * (x @ share)
        through = np.maximum(0.0, errors @ (share * x) / (x @ (share * x)))  # with a floor of 0
        slope = np.where(constant < 0, through, slope)
        constant = np.maximum(0.0, constant)
        loss = np.square(errors - constant[:, None] - slope[:, None] * x) @ share
        better = loss < best * (1 - 1e-9)
        best = np.where(better, loss, best)
        floor, exponent = np.where(better, constant, floor), np.where(better, power, exponent)
        scale = np.where(better, slope * samples.max() ** power, scale)
    return PowerLaws(floor, scale, exponent)
