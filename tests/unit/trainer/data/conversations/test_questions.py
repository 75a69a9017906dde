"""Options of a question are read with it, in each of the forms that published sets have, and its answer is one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vlmpipe.trainer.data.accounting.keys import VECTOR, Record
from vlmpipe.trainer.data.conversations.questions import asked
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError

OPTION = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=6).filter(str.strip)
FORMS: dict[str, Any] = {
    "options": lambda texts: {"options": texts},
    "choices as Python prints them": lambda texts: {"choices": repr(texts)},
    "by letter": lambda texts: {"options": dict(zip("ABCDEFGH", texts, strict=False)) | {"Z": None}},
    "columns": lambda texts: dict(zip("ABCDEFGH", texts, strict=False)),
    "named columns": lambda texts: {f"choice_{letter}": text for letter, text in zip("abcdefgh", texts, strict=False)},
}


@pytest.mark.parametrize("form", FORMS)
@given(texts=st.lists(OPTION, min_size=2, max_size=8), data=st.data())
def test_options_stand_behind_the_question_and_a_number_becomes_a_letter(
    form: str, texts: list[str], data: st.DataObject
) -> None:
    right = data.draw(st.integers(0, len(texts) - 1))
    assume(str(right) not in texts)  # the number of one option and the text of another is rejected
    record = Record({"question": "\0", "answer": right, **FORMS[form](texts)})
    question, answer = asked(record)
    lettered = [f"{letter}. {text}" for letter, text in zip("ABCDEFGH", texts, strict=False)]
    assert question.split("\n") == ["\0", *lettered]
    assert answer == "ABCDEFGH"[right]
    assert record.unread(has_media=True) == ()


@pytest.mark.parametrize(
    ("record", "question", "answer"),
    [
        ({"question": "Q", "answer": "B", "options": "[]"}, "Q", "B"),
        ({"question": "Q", "answer": 7, "options": []}, "Q", "7"),
        ({"question": "Q", "answer": "2", "options": [1, 2]}, "Q\nA. 1\nB. 2", "2"),
        ({"question": "Q", "answer": ["yes"]}, "Q", "yes"),
        ({"question": "Which?\n(A) red\n(B) blue", "answer": "A", "options": ["red", "blue"]}, None, "A"),
        ({"question": "Q", "answer": "B", "hint": "It rains.", "A": "x", "C": "y"}, "It rains.\nQ\nA. x\nC. y", "B"),
        ({"question": "Q", "answer": "no", "A": "a key of its own"}, "Q", "no"),
        ({"question": "Red or blue?", "answer": 1, "options": ["Red", "blue"]}, "Red or blue?\nA. Red\nB. blue", "B"),
        (
            {"question": "A. redder\nB. blue", "answer": 1, "options": ["red", "blue"]},
            "A. redder\nB. blue\nA. red\nB. blue",
            "B",
        ),
        ({"question": "Q", "answer": 1, "options": ["", "a", "b"]}, "Q\nB. a\nC. b", "B"),
        ({"question": "Q", "answer": 1, "options": [0, 1, 2]}, "Q\nA. 0\nB. 1\nC. 2", "B"),
        ({"question": "Q", "answer": 20, "options": [10, 20]}, "Q\nA. 10\nB. 20", "20"),
        ({"question": "Q", "answer": "A", "options": r'["\ud83d\ude00", "x", null]'}, "Q\nA. \U0001f600\nB. x", "A"),
    ],
)
def test_what_is_read(record: dict[str, Any], question: str | None, answer: str) -> None:
    assert asked(Record(record)) == (record["question"] if question is None else question, answer)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"answer": "1", "options": ["a", "b"]}, "'answer' is 1, which is no option"),
        ({"answer": 2, "options": ["a", "b"]}, "'answer' is 2, which is no option"),
        ({"answer": -1, "options": ["a", "b"]}, "'answer' is -1, which is no option"),
        ({"answer": 2, "options": [1, 2, 3]}, "'answer' is 2, which is an option and, from 0, the number of another"),
        ({"answer": "A", "options": "['a' 'b']"}, "'options' is a text of one option, maybe of several without commas"),
        ({"answer": "A", "options": "[{[1]: 2}]"}, "'options' is a text, not a list"),
        ({"answer": "A", "options": {"AB": "x", "": "y"}}, "'options' is an object, not a list"),
        ({"answer": "A", "options": VECTOR}, "'options' is a column of lists of numbers, not a list"),
        ({"answer": "A", "options": 4}, "'options' is a number, not a list"),
        ({"answer": "A", "options": "['a'"}, "'options' is a text, not a list"),
        ({"answer": "A", "options": ["a", None, {}]}, "'options' is an object, not a text"),
        ({"answer": "A", "options": ["x"] * 27}, "at most 26 options"),
        ({"answer": ["a", "b"]}, "'answer' is a list"),
        ({"answers": ["a", "b"]}, "'answer' is missing beside 'answers'"),
    ],
)
def test_what_is_no_option_is_rejected_in_words(more: dict[str, Any], words: str) -> None:
    with pytest.raises(RejectedError, match=words) as rejected:
        asked(Record({"question": "Q", **more}))
    assert rejected.value.code == RejectCode.RECORD_FORM
