"""Places of prefixes: of texts one after the other, of which each leaves out what the one before begins with, too."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.data.prefixes.spans import prefix_spans

TEXTS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=10)


def common(before: str, text: str) -> int:
    """Characters that both begin with, without the last one of the text."""
    return next(tokens for tokens in range(len(text) - 1, -1, -1) if before[:tokens] == text[:tokens])


@given(TEXTS)
def test_each_text_is_its_prefixes_and_what_it_adds(texts: list[str]) -> None:
    shared = [0, *(common(*pair) for pair in pairwise(texts))][: len(texts)]
    added = [text[tokens:] for text, tokens in zip(texts, shared, strict=True)]
    row, spans = "".join(added), prefix_spans([len(text) for text in added], shared)
    for text, (start, stop) in zip(texts, pairwise(accumulate(map(len, added), initial=0)), strict=False):
        before = "".join(row[first:end] for first, end, last in spans if end <= start < last)
        assert before + row[start:stop] == text
    for number, (first, end, last) in enumerate(spans):
        assert first < end < last
        for _, inner, inner_last in [span for span in spans[number + 1 :] if span[0] < last]:
            assert end < inner and inner_last <= last, "a prefix inside of another one's branches"


@pytest.mark.parametrize(
    ("shared", "expected"),
    [
        ([], []),
        ([0, 0], []),
        ([0, 4, 4], [(0, 4, 15)]),
        ([0, 4, 0, 3], [(0, 4, 10), (10, 13, 20)]),
        ([0, 4, 2, 3], [(0, 2, 20), (2, 4, 10), (10, 11, 20)]),
        ([0, 2, 2, 3], [(0, 2, 20), (10, 11, 20)]),
    ],
    ids=["none", "alone", "questions", "pairs", "pairs about one image", "a pair without a question"],
)
def test_places(shared: list[int], expected: list[tuple[int, int, int]]) -> None:
    assert prefix_spans([5] * len(shared), shared) == expected
