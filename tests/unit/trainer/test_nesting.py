"""Values at the bound and one level deeper, in objects and lists, and beside wide ones."""

from __future__ import annotations

import json

import pytest

from vlmpipe.trainer.nesting import MAX_LEVELS, is_nested_too_deep


@pytest.mark.parametrize(("begin", "end", "levels"), [('{"a":', "}", 1), ("[", "]", 1), ('[{"a":', "}]", 2)])
def test_the_bound_counts_objects_and_lists(begin: str, end: str, levels: int) -> None:
    most = MAX_LEVELS // levels
    for count, too_deep in ((most, False), (most + 1, True), (900 // levels, True)):
        text = begin * count + "1" + end * count
        assert is_nested_too_deep(json.loads(text), text) == too_deep


def test_a_wide_value_is_not_deep() -> None:
    text = json.dumps([{"turns": [{"from": "human"}] * 40}] * 40)
    assert not is_nested_too_deep(json.loads(text), text)
