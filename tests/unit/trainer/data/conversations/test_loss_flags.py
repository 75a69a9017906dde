"""Answers whose weight is 0 are read and are no labels; shares of the loss are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.data.prepared import conversation
from vlmpipe.trainer.data.accounting.keys import LABEL_KEYS, Record
from vlmpipe.trainer.data.conversations.loss_flags import LOSS_FLAGS, is_learned
from vlmpipe.trainer.data.conversations.records import SHAPES, turns_of
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError

FLAGS = st.dictionaries(st.sampled_from(sorted(LOSS_FLAGS)), st.sampled_from([0, 1, True, False, 1.0, 0.0, None]))


@given(FLAGS)
def test_flags_agree_or_the_record_is_rejected(flags: dict[str, Any]) -> None:
    stated = {bool(value) for value in flags.values() if value is not None}
    if len(stated) > 1:
        with pytest.raises(RejectedError) as rejected:
            is_learned(flags, "messages 2", is_answer=True)
        assert rejected.value.code == RejectCode.RECORD_CONFLICT
    else:
        assert is_learned(flags, "messages 2", is_answer=True) == (False not in stated)


@pytest.mark.parametrize("name", sorted(LOSS_FLAGS))
@pytest.mark.parametrize(
    ("value", "words"),
    [(0.5, "is 0.5"), (-1, "is -1"), ("1", "is a text"), ([1], "is a list"), (float("nan"), "is nan")],
)
def test_a_share_of_the_loss_is_refused_in_words(name: str, value: Any, words: str) -> None:
    with pytest.raises(RejectedError, match=rf"messages 2\.{name} {words}") as rejected:
        is_learned({name: value}, "messages 2", is_answer=True)
    assert rejected.value.code == RejectCode.CONV_LABELS


def test_flags_are_read_in_messages_and_refused_elsewhere() -> None:
    assert LABEL_KEYS.keys() >= LOSS_FLAGS
    with pytest.raises(RejectedError, match="the record has 'weight': 0"):
        Record({"weight": 0}).unread(has_media=False)


@pytest.mark.parametrize("name", ["rejected", "rejected_response"])
def test_a_rejected_answer_is_read_under_both_names(name: str) -> None:
    record = Record({"messages": conversation("A?", "B."), name: "C."})
    (turn,) = turns_of(record, 0, "", tuple(SHAPES))
    assert turn.rejected == "C." and record.unread(has_media=False) == ()


@pytest.mark.parametrize("key", ["messages", "texts", "turns"])
def test_each_shape_that_has_turns_reads_them(key: str) -> None:
    names = {"texts": ("user", "assistant"), "turns": ("question", "answer")}
    pairs = [("A?", "B.", 0), ("C?", "D.", 1)]
    if key == "messages":
        turns = [
            {**one, **({"weight": weight} if one["from"] == "gpt" else {})}
            for question, answer, weight in pairs
            for one in conversation(question, answer)
        ]
    else:
        turns = [dict(zip(names[key], pair[:2], strict=True), weight=pair[2]) for pair in pairs]
    record = Record({key: turns})
    assert [turn.is_context for turn in turns_of(record, 0, "", tuple(SHAPES))] == [True, False]
    assert record.unread(has_media=False) == ()
