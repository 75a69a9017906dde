"""The laws: what is given is found, none rises, and what is never reached is said."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.comparison.curve.law import Shape, fit_laws, fit_shape, shapes_of

SAMPLES = np.array([50.0, 100.0, 200.0, 400.0, 1000.0])
SHAPES = [shape for shape in shapes_of(SAMPLES) if 0.3 < shape.exponent < 1.6]
BELOW = 1e-6  # of a part that is left, so small that floor and scale are not told apart by it


@given(st.floats(0.0, 0.4), st.floats(0.1, 0.5), st.sampled_from(SHAPES))
def test_a_curve_of_one_shape_is_found(floor: float, scale: float, shape: Shape) -> None:
    errors = floor + scale * shape.fall(SAMPLES)
    found, factor, loss = fit_shape(shape, SAMPLES, errors[None], np.ones(5))
    assert (found[0], factor[0]) == (pytest.approx(floor, abs=1e-6), pytest.approx(scale, rel=1e-4))
    assert loss[0] == pytest.approx(0, abs=1e-12)
    laws = fit_laws(SAMPLES, errors, errors[None].repeat(20, 0), np.full(5, 1e-9))
    for samples, error in zip(SAMPLES, errors, strict=True):
        assert laws.errors(samples) == pytest.approx(error, abs=1e-3)


@given(st.sampled_from(SHAPES), st.floats(30.0, 3000.0))
def test_samples_for_a_part_are_those_that_leave_it(shape: Shape, samples: float) -> None:
    left = shape.fall(np.array([samples]))
    assert left[0] < BELOW or shape.samples_for(left)[0] == pytest.approx(samples, rel=1e-3)


@given(st.lists(st.floats(0, 1), min_size=5, max_size=5), st.lists(st.floats(1e-5, 1e-2), min_size=5, max_size=5))
def test_no_fitted_curve_rises_or_has_less_than_no_error(errors: list[float], variances: list[float]) -> None:
    draws = np.array([errors]).repeat(10, 0)
    laws = fit_laws(SAMPLES, np.array(errors), draws, np.array(variances))
    assert (laws.floor >= 0).all() and (laws.scale >= 0).all() and laws.likely.sum() == pytest.approx(1)
    fitted = [laws.errors(samples) for samples in (10, *SAMPLES, 1e6)]
    assert all((later <= earlier + 1e-12).all() for earlier, later in pairwise(fitted))


def test_an_error_below_the_floor_is_never_reached() -> None:
    errors = 0.2 + SAMPLES**-0.5
    laws = fit_laws(SAMPLES, errors, errors[None].repeat(50, 0), np.full(5, 1e-8))
    assert (laws.samples_for(0.05 - laws.floor) == np.inf).all()
    assert np.isfinite(laws.samples_for(0.3 - laws.floor)).all()


def test_points_that_several_forms_fit_are_read_by_all_of_them() -> None:
    errors = 0.1 + 0.6 * (SAMPLES[:3] / 50) ** -0.7
    laws = fit_laws(SAMPLES[:3], errors, errors[None].repeat(2000, 0), np.full(3, 0.02**2))
    forms = {laws.shapes[place].form for place in laws.place.tolist()}
    assert forms == {"power", "logistic", "exponential"}
    low, high = np.quantile(laws.errors(1000), (0.1, 0.9))
    assert high - low > 0.05, "equal draws of three points, and yet laws differ at five times the samples"
