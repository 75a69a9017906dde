"""A conversation asks each question after the earlier ones, and forgets the oldest where they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vlmpipe.serving import conversation as module
from vlmpipe.serving.conversation import Conversation
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.evaluation.answer import Asked, ShownImages

A_TURN = 10  # tokens
SHOWN = ShownImages([4], [(8, 8)], ["a"], lambda: [b""], are_cached=False)


class TenTokensATurn:
    def prompt(self, _turn: Turn, _counts: object, _sizes: object, earlier: Sequence[Turn]) -> list[int]:
        return [0] * A_TURN * (1 + len(earlier))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """What the model is asked; it answers with the number of turns that it sees."""
    seen: list[Asked] = []

    def answer(
        _job: object, _model: object, questions: Sequence[Asked], *_rest: object, **_options: object
    ) -> list[Any]:
        seen.extend(questions)
        return [SimpleNamespace(text=f"{len(questions[0].earlier)} before")]

    monkeypatch.setattr(module, "answer_questions", answer)
    monkeypatch.setattr(
        module, "ask_about", lambda _job, _chat, text, _data, _name: Asked(Turn(f"<image>\n{text}", "-"), SHOWN, SHOWN)
    )
    return seen


def conversation(tmp_path: Path, length: int) -> Conversation:
    image = tmp_path / "a.png"
    image.write_bytes(b"")
    job = SimpleNamespace(data=SimpleNamespace(sequence_length=length), evaluate=SimpleNamespace(max_new_tokens=5))
    predictor = SimpleNamespace(job=job, model=SimpleNamespace(chat=TenTokensATurn()), device="cpu")
    return Conversation(predictor, image)  # type: ignore[arg-type]


def test_the_image_is_shown_once_in_the_first_turn(tmp_path: Path, asked: list[Asked]) -> None:
    talk = conversation(tmp_path, 1000)
    assert [talk.ask(text).text for text in ("one", "two", "three")] == ["0 before", "1 before", "2 before"]
    last = asked[-1]
    said = [(turn.question, turn.answer) for turn in last.earlier]
    assert said == [("<image>\none", "0 before"), ("two", "1 before")] and last.turn.question == "three"
    assert asked[0].turn.question == "<image>\none" and not asked[0].earlier


def test_the_oldest_turns_are_forgotten_where_they_do_not_fit(tmp_path: Path, asked: list[Asked]) -> None:
    talk = conversation(tmp_path, 3 * A_TURN + 5)
    replies = [talk.ask(str(number)) for number in range(5)]
    assert [reply.forgotten for reply in replies] == [0, 0, 0, 1, 1]
    assert [turn.question for turn in asked[-1].earlier] == ["<image>\n2", "3"]
    assert [turn.question for turn in talk.turns] == ["2", "3", "4"]


def test_one_question_is_asked_however_long(tmp_path: Path, asked: list[Asked]) -> None:
    talk = conversation(tmp_path, 1)
    talk.ask("one")
    assert talk.ask("two").forgotten == 1 and asked[-1].turn.question == "<image>\ntwo"


def test_a_question_without_an_answer_is_not_said_again(
    tmp_path: Path, asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = conversation(tmp_path, 1000)
    with monkeypatch.context() as silent:
        silent.setattr(module, "answer_questions", lambda *_all, **_options: [SimpleNamespace(text=" ")])
        assert talk.ask("one").text == " "
    talk.ask("two")
    assert not asked[-1].earlier and asked[-1].turn.question == "<image>\ntwo"
