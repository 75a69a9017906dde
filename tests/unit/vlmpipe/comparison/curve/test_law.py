"""The power law: it finds what it is given, never rises, and says where nothing is reached."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.comparison.curve.law import EXPONENTS, fit_power_laws

SAMPLES = np.array([50.0, 100.0, 200.0, 400.0, 1000.0])


@given(st.floats(0.0, 0.4), st.floats(0.05, 0.5), st.sampled_from(EXPONENTS[5:40].tolist()))
def test_a_curve_that_is_a_power_law_is_found(floor: float, at_1000: float, exponent: float) -> None:
    errors = floor + at_1000 * (SAMPLES / 1000) ** -exponent
    law = fit_power_laws(SAMPLES, errors[None], np.ones(5))
    assert law.exponent[0] == pytest.approx(exponent)
    assert law.floor[0] == pytest.approx(floor, abs=1e-6)
    assert [law.errors(samples)[0] for samples in SAMPLES] == pytest.approx(errors.tolist())
    assert law.samples_for(np.array([at_1000]))[0] == pytest.approx(1000, rel=1e-6)


@given(st.lists(st.floats(0, 1), min_size=5, max_size=5), st.lists(st.floats(0.01, 100), min_size=5, max_size=5))
def test_no_fitted_curve_rises_or_has_less_than_no_error(errors: list[float], weights: list[float]) -> None:
    law = fit_power_laws(SAMPLES, np.array([errors]), np.array(weights))
    assert law.floor[0] >= 0 and law.scale[0] >= 0
    fitted = [law.errors(samples)[0] for samples in (10, *SAMPLES, 1e6)]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(fitted))


def test_an_error_below_the_floor_is_never_reached() -> None:
    law = fit_power_laws(SAMPLES, (0.2 + SAMPLES**-0.5)[None], np.ones(5))
    assert law.samples_for(0.1 - law.floor)[0] == np.inf
    assert np.isfinite(law.samples_for(0.3 - law.floor)[0])
