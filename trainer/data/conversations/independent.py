"""Turns of a record that become samples of their own (`data.turns: independent`)."""

from __future__ import annotations

from collections.abc import Sequence

from vlmpipe.trainer.data.sample import Turn


def independent_spans(turns: Sequence[Turn]) -> list[tuple[int, int]]:
    """First turn of each sample, and the one after its last.

    A sample is one turn, with the turns directly before it whose answers are read and no labels, and with the results
    of its calls of tools. Turns after the last label are in none.
    """
    spans, start = [], 0
    for stop, turn in enumerate(turns, 1):
        has_result = stop < len(turns) and turns[stop].results
        if not turn.is_context and not has_result:
            spans.append((start, stop))
            start = stop
    if any(not turn.is_context for turn in turns[start:]):  # a call whose results' answer is no label
        spans.append((start, len(turns)))
    return spans
