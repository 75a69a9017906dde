"""The client of chat completions: a strict server on this machine, and everything that it can answer amiss."""

from __future__ import annotations

import dataclasses

import pytest

from tests.fakes.chat_model import ChatModelServer
from tests.support.vertex.endpoints import asked_questions, right, wrong
from vlmpipe.serving.agreement import measure_agreement, require_agreement
from vlmpipe.serving.openai import Answer, ChatServer, answer_in, refusal
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
    ("status", "code"),
    [
        (400, ExitCode.DATA),
        (401, ExitCode.NO_PERMISSION),
        (404, ExitCode.CONFIG),
        (413, ExitCode.DATA),
        (429, ExitCode.UNAVAILABLE),
        (500, ExitCode.UNAVAILABLE),
        (503, ExitCode.UNAVAILABLE),
    ],
)
def test_a_server_that_refuses_is_a_sentence(status: int, code: ExitCode) -> None:
    with ChatModelServer("digits", right) as server:
        server.refuses = status
        with pytest.raises(UserError, match=f"refuses the request: {status} no capacity\n") as caught:
            measure_agreement(asked_questions(), ChatServer(server.url, "digits").ask)
    assert caught.value.code == code


def test_a_servers_sentence_reaches_no_terminal_raw() -> None:
    said = refusal("http://here", 400, '{"error": {"message": "too\\u001b[31m long"}}').text()
    assert "too long" in said and "\x1b" not in said


def test_a_server_that_is_not_there_or_knows_another_model_is_a_sentence() -> None:
    with ChatModelServer("digits", right) as server, pytest.raises(UserError, match=r"404 .*does not exist") as caught:
        ChatServer(server.url, "other").ask(asked_questions()[0].messages, 4)
    assert caught.value.code == ExitCode.CONFIG
    with pytest.raises(UserError, match="does not answer") as caught:
        ChatServer(server.url, "digits").ask(asked_questions()[0].messages, 4)
    assert caught.value.code == ExitCode.UNAVAILABLE


@pytest.mark.parametrize("content", [b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{"message": null}]}'])
def test_something_else_than_a_completion_is_a_sentence(content: bytes) -> None:
    with pytest.raises(UserError, match="something else than a chat completion"):
        answer_in("http://server", content, {})


def test_thinking_is_no_part_of_an_answer() -> None:
    content = b'{"choices": [{"message": {"content": "<think>three?</think> 3 "}, "finish_reason": "stop"}]}'
    assert answer_in("", content, {}) == Answer("3", "stop", has_space=True)


CUT = "\ufffd"


@pytest.mark.parametrize(
    ("evaluated", "served", "agrees"),
    [
        (("seven", "stop"), ("seven", "stop"), True),
        (("seven", "stop"), ("seven", "length"), False),  # it has other end tokens
        (("seven", "stop"), ("seven", ""), True),
        (("seven", ""), ("seven", "stop"), True),
        ((f"s{CUT}", "length"), ("s", "length"), True),
        ((f"s {CUT}{CUT}", "length"), ("s", "length"), True),
        ((f"s{CUT}", "stop"), ("s", "stop"), True),  # an end token within a character
        ((f"s{CUT}e", "length"), ("se", "length"), False),
        ((f"s{CUT}", "length"), ("x", "length"), False),
        (("se", "length"), ("s", "length"), False),
    ],
)
def test_answers_agree_by_text_and_end(evaluated: tuple[str, str], served: tuple[str, str], agrees: bool) -> None:
    question = dataclasses.replace(asked_questions()[0], evaluated=evaluated[0], finish_reason=evaluated[1])
    found = measure_agreement([question], lambda *_: Answer(*served))
    assert found.share == agrees
    assert found.cut == (agrees and CUT in evaluated[0])
    assert found.unfinished == (not (evaluated[1] and served[1]))


def test_what_is_passed_over_is_counted_in_the_sentence() -> None:
    first, second, *_ = asked_questions()
    questions = [dataclasses.replace(first, evaluated=f"0{CUT}", finish_reason="length"), second]
    given = iter([Answer("0", "length", has_space=True), Answer("1", "stop")])
    sentence = measure_agreement(questions, lambda *_: next(given)).sentence()
    assert sentence == (
        "2 of 2 validation questions answered as in evaluation (1 of them but for an incomplete character at their "
        "end; "
        "1 with white space around them, which evaluation takes off; 1 without a reason for their end to compare)"
    )


def test_other_ends_are_shown() -> None:
    question = dataclasses.replace(asked_questions()[0], finish_reason="stop")
    found = measure_agreement([question], lambda *_: Answer("0", "length"))
    assert "evaluated '0' (stop), served '0' (length)" in found.sentence()
