"""The client of chat completions: a strict server on this machine, and everything that it can answer amiss."""

from __future__ import annotations

import pytest

from tests.fakes.chat_model import ChatModelServer
from tests.support.vertex.endpoints import asked_questions, right, wrong
from vlmpipe.serving.agreement import measure_agreement, require_agreement
from vlmpipe.serving.openai import ChatServer, _text
from vlmpipe.trainer.errors import ExitCode, UserError


def test_answers_that_are_the_evaluations_agree() -> None:
    with ChatModelServer("digits", right) as server:
        found = measure_agreement(asked_questions(), ChatServer(server.url, "digits").ask)
    assert (found.asked, found.share, server.asked) == (10, 1.0, 10)
    require_agreement(found, 1.0)


def test_other_answers_are_shown_and_refused() -> None:
    with ChatModelServer("digits", wrong) as server:
        found = measure_agreement(asked_questions(), ChatServer(server.url, "digits").ask)
    assert found.share == pytest.approx(0.1)
    assert "digit-0 turn 0: evaluated '0', served '7'" in found.sentence()
    with pytest.raises(UserError) as caught:
        require_agreement(found, 0.95)
    assert caught.value.code == ExitCode.REJECTED


@pytest.mark.parametrize(
    ("status", "code"), [(401, ExitCode.NO_PERMISSION), (429, ExitCode.UNAVAILABLE), (503, ExitCode.UNAVAILABLE)]
)
def test_a_server_that_refuses_traffic_is_a_sentence(status: int, code: ExitCode) -> None:
    with ChatModelServer("digits", right) as server:
        server.refuses = status
        with pytest.raises(UserError, match=f"refuses the request: {status}") as caught:
            measure_agreement(asked_questions(), ChatServer(server.url, "digits").ask)
    assert caught.value.code == code


def test_a_server_that_is_not_there_or_knows_another_model_is_a_sentence() -> None:
    with ChatModelServer("digits", right) as server, pytest.raises(UserError, match=r"404 .*does not exist"):
        ChatServer(server.url, "other").ask(asked_questions()[0].messages, 4)
    with pytest.raises(UserError, match="does not answer") as caught:
        ChatServer(server.url, "digits").ask(asked_questions()[0].messages, 4)
    assert caught.value.code == ExitCode.UNAVAILABLE


@pytest.mark.parametrize("content", [b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{"message": null}]}'])
def test_something_else_than_a_completion_is_a_sentence(content: bytes) -> None:
    with pytest.raises(UserError, match="something else than a chat completion"):
        _text("http://server", content)


def test_thinking_is_no_part_of_an_answer() -> None:
    assert _text("", b'{"choices": [{"message": {"content": "<think>three?</think> 3 "}}]}') == "3"
