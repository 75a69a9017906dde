"""What evaluate.json says of answers that the limit of tokens cuts."""

from __future__ import annotations

import pytest

from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.tokenize import make_tokenizer
from vlmpipe.trainer.evaluation.metrics import Prediction, Question
from vlmpipe.trainer.evaluation.validation.result import cut_answers


@pytest.mark.parametrize(("limit", "longer"), [(1, 3), (2, 1), (3, 0)])
def test_an_expected_answer_is_as_long_as_what_a_model_generates_for_it(limit: int, longer: int) -> None:
    """The template puts a space before an answer, which is a token of its own in front of a digit."""
    chat = Chat(make_tokenizer("train:280", ["which digit is red? 1 2 3"] * 3))
    questions = [Question(number, f"s{number}", 0, "", "?", answer) for number, answer in enumerate(("5", "7", "57"))]
    predictions = [Prediction(one.id, 0, "", "?", one.answer, "", False, "length") for one in questions]
    found = cut_answers(predictions, questions, chat, limit)
    assert found == {"max_new_tokens": limit, "cut_answers": 3, "longer_expected_answers": longer}
