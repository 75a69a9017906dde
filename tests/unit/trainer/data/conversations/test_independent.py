"""Turns that are samples of their own."""

from __future__ import annotations

from vlmpipe.trainer.data.conversations.independent import independent_spans
from vlmpipe.trainer.data.sample import Turn

LEARNED, READ = Turn("q", "a"), Turn("q", "a", is_context=True)
CALL, RESULT = Turn("q", "", calls="[]"), Turn("", "a", results=("1",))


def test_each_learned_turn_is_a_sample_with_what_is_read_before_it() -> None:
    assert independent_spans([LEARNED, READ, READ, LEARNED, LEARNED]) == [(0, 1), (1, 4), (4, 5)]


def test_a_call_stays_with_its_results() -> None:
    assert independent_spans([LEARNED, CALL, RESULT, LEARNED]) == [(0, 1), (1, 3), (3, 4)]
    read_result = Turn("", "a", results=("1",), is_context=True)
    assert independent_spans([CALL, read_result]) == [(0, 2)]


def test_turns_after_the_last_label_are_in_no_sample() -> None:
    assert independent_spans([LEARNED, READ]) == [(0, 1)]
