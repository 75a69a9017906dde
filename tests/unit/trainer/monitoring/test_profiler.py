"""Joining the spans of a profile."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.monitoring.profiler import covered_s, joined_spans

TIMES = st.floats(0, 1, allow_subnormal=False)
SPANS = st.lists(st.tuples(TIMES, TIMES).map(lambda pair: (min(pair), max(pair))), max_size=30)


@given(SPANS, st.sampled_from([0.0, 0.01, 0.3]))
def test_joined_spans_are_apart_and_cover_all(spans: list[tuple[float, float]], gap_s: float) -> None:
    joined = joined_spans(spans, gap_s=gap_s)
    assert all(later[0] - earlier[1] > gap_s for earlier, later in itertools.pairwise(joined))
    assert all(any(start <= one[0] and one[1] <= end for start, end in joined) for one in spans)
    edges = {edge for one in spans for edge in one}
    assert {edge for one in joined for edge in one} <= edges


def test_time_under_several_spans_counts_once() -> None:
    assert covered_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == 4.0
    assert covered_s([]) == 0.0


def test_a_gap_as_wide_as_the_limit_is_closed() -> None:
    assert joined_spans([(2.0, 3.0), (0.0, 1.0)], gap_s=1.0) == [(0.0, 3.0)]
    assert joined_spans([(2.0, 3.0), (0.0, 1.0)], gap_s=0.5) == [(0.0, 1.0), (2.0, 3.0)]
