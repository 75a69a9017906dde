"""The fake of chat completions answers what real vLLM was recorded to answer, case by case."""

from __future__ import annotations

import json

import pytest

from tests.fakes.chat_model import PATH, ChatModelServer
from tests.support.engines.chat_contract import CASES, RECORD, answers_of, general
from vlmpipe.serving import openai
from vlmpipe.serving.openai import ChatServer
from vlmpipe.trainer.errors import ExitCode, UserError

RECORDED = json.loads(RECORD.read_text())["cases"]
ADDRESSES = ("an unknown model", "another path")  # errors in what names the server


def test_the_fake_answers_as_the_recorded_server() -> None:
    with ChatModelServer("tiny", lambda _: "seven") as server:
        assert answers_of(server.url.removesuffix(PATH), "tiny") == RECORDED


def test_the_record_has_every_case_and_errors_of_several_kinds() -> None:
    assert RECORDED.keys() == CASES.keys()
    assert {one["status"] for one in RECORDED.values()} == {200, 400, 404, 405}


@pytest.mark.parametrize("case", [name for name, one in RECORDED.items() if one["status"] >= 400 and CASES[name][1]])
def test_what_the_server_refuses_is_wrong_input_with_its_sentence(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, request = CASES[case]
    assert request
    monkeypatch.setattr(openai, "request_body", lambda name, *_: json.dumps({"model": name} | request).encode())
    with ChatModelServer("tiny", lambda _: "seven") as server, pytest.raises(UserError) as caught:
        ChatServer(server.url.removesuffix(PATH) + path, "tiny").ask([], 4)
    assert caught.value.code == (ExitCode.CONFIG if case in ADDRESSES else ExitCode.DATA)
    body = RECORDED[case]["body"]
    said = body["error"]["message"] if "error" in body else body["detail"]
    sentence, found = " ".join(said.replace("MODEL", "tiny").split())[:100], general(caught.value.found)
    assert f"refuses the request: N {sentence}" in found and '{"' not in found
