"""Sequences of a validation by source hold the same samples, and no more of them than fit."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.evaluation.validation_loss import by_source

ROOM = 6


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=ROOM), max_size=12))
def test_each_sequence_is_of_one_source_and_within_the_budget(rows: list[list[int]]) -> None:
    def source_of(sample: int) -> str:
        return "abc"[sample % 3]

    found = by_source(rows, source_of, lambda samples: len(samples) <= ROOM)
    assert list(found) == sorted(found)
    for source, of_source in found.items():
        assert all(row and len(row) <= ROOM for row in of_source)
        assert {source_of(sample) for row in of_source for sample in row} == {source}
        assert len(of_source) <= sum(any(source_of(sample) == source for sample in row) for row in rows)
    given_samples = Counter(sample for row in rows for sample in row)
    assert Counter(sample for of_source in found.values() for row in of_source for sample in row) == given_samples
