"""Charts: any numbers stay inside the frame, and thinning keeps extremes."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.report.svg_charts import line_chart, nice_ticks, thin_out

finite = st.floats(-1e9, 1e9, allow_nan=False)


@given(finite, finite)
def test_ticks_cover_the_range_in_few_even_steps(a: float, b: float) -> None:
    low, high = sorted((a, b))
    ticks = nice_ticks(low, high)
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))


@given(st.lists(finite, min_size=1, max_size=60), st.sampled_from([0, 1000]))
def test_a_chart_of_any_numbers_stays_inside_its_frame(values: list[float], more: int) -> None:
    points = [(float(step), value) for step, value in enumerate(values * (1 + more // len(values)))]
    svg = str(line_chart(points, label="x", x_label="step", smoothed=True))
    for pair in " ".join(re.findall(r'points="([^"]*)"', svg)).split():
        x, y = map(float, pair.split(","))
        assert 0 <= x <= 560
        assert 0 <= y <= 300


@given(st.lists(finite, min_size=1, max_size=3000))
def test_thinning_keeps_the_extremes(values: list[float]) -> None:
    thin = thin_out(list(enumerate(values)), 100)
    assert len(thin) <= 100
    assert {min(values), max(values)} <= {y for _, y in thin}
    assert thin == sorted(thin)
