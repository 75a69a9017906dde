"""Places of shared prefixes in a packed sequence, whose conversations leave out a prefix of an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

Span = tuple[int, int, int]  # first token of a prefix, its end, and the end of the last conversation that has it


def prefix_spans(added_tokens: Sequence[int], shared_tokens: Sequence[int]) -> list[Span]:
    """The prefixes, in order; those inside of others begin where these end.

    Args:
        added_tokens: of each conversation, without those that the one before has, too.
        shared_tokens: that each conversation and the one before begin with; 0 for the first one.
    """
    spans: list[Span] = []
    starts = [start for start, _ in pairwise(accumulate(added_tokens, initial=0))]
    open_prefixes = [(0, 0)]  # tokens up to the end of each prefix, and the first conversation that has it
    for number, shared in enumerate([*shared_tokens[1:], 0], 1):
        first = number - 1
        while open_prefixes[-1][0] > shared:
            tokens, first = open_prefixes.pop()
            outer = max(open_prefixes[-1][0], shared)  # tokens of the prefix around this one
            start = starts[first] + outer - shared_tokens[first]
            spans.append((start, start + tokens - outer, starts[number - 1] + added_tokens[number - 1]))
        if shared > open_prefixes[-1][0]:
            open_prefixes.append((shared, first))
    return sorted(spans)
