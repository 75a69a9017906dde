"""The small stand-ins, a served chat model and Secret Manager with a webhook, refuse what the real ones do."""

from __future__ import annotations

import base64
import http.client
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from PIL import Image

from tests.fakes.chat_model import ChatModelServer
from tests.fakes.receiver import Receiver

VERSION = "projects/p/secrets/s/versions/1"


def ask(url: str, method: str, path: str, body: Any = None, kind: str = "application/json") -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://").partition("/")[0], timeout=10)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data if method == "POST" else None, {"Content-Type": kind})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


# ---- a chat model


@pytest.fixture
def model() -> Iterator[ChatModelServer]:
    with ChatModelServer("mine", lambda text: text[::-1]) as running:
        yield running


def picture() -> dict[str, Any]:
    data = io.BytesIO()
    Image.new("RGB", (2, 2)).save(data, "PNG")
    text = base64.b64encode(data.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}


def question(*parts: dict[str, Any]) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "abc"}]
    messages = [{"role": "user", "content": content}]
    return {"model": "mine", "messages": messages, "max_tokens": 4, "temperature": 0}


BROKEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
QUESTIONS: dict[str, tuple[Callable[[], Any], int, str]] = {
    "no JSON": (lambda: b"{", 400, "no JSON"),
    "another model": (lambda: question() | {"model": "other"}, 404, "does not exist"),
    "an unknown field": (lambda: question() | {"colour": 1}, 400, "colour"),
    "a random answer": (lambda: question() | {"temperature": 0.7}, 400, "greedy"),
    "an answer of no length": (lambda: question() | {"max_tokens": 0}, 400, "max_tokens must be at least 1"),
    "an answer before the question": (
        lambda: question() | {"messages": [{"role": "assistant", "content": "x"}, question()["messages"][0]]}, 400,
        "roles",
    ),
    "an image that does not decode": (lambda: question(BROKEN), 400, "Failed to load image"),
    "a sound": (lambda: question({"type": "input_audio"}), 400, "input_audio"),
}  # fmt: skip


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_with_one_fault_is_refused(model: ChatModelServer, name: str) -> None:
    make, code, said = QUESTIONS[name]
    found, answer = ask(model.url, "POST", "/v1/chat/completions", make())
    assert (found, said in answer["error"]["message"]) == (code, True), answer


def test_a_good_question_is_answered_and_other_addresses_are_not_there(model: ChatModelServer) -> None:
    found, answer = ask(model.url, "POST", "/v1/chat/completions", question(picture()))
    assert (found, answer["choices"][0]["message"]["content"]) == (200, "cba")
    assert ask(model.url, "POST", "/v1/completions", question())[0] == 404
    model.refuses = 503
    assert ask(model.url, "POST", "/v1/chat/completions", question())[0] == 503


# ---- Secret Manager, and a webhook


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        running.secrets = {VERSION: "s3cret", "projects/p/secrets/s/versions/latest": "s3cret"}
        yield running


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (f"/v1/{VERSION}:access", 200),
        ("/v1/projects/p/secrets/s/versions/latest:access", 200),
        (f"/v1/{VERSION}", 404),
        (f"/v1beta1/{VERSION}:access", 404),
        ("/v1/projects/p/secrets/s:access", 404),
        ("/v1/projects/p/secrets/s/versions/0:access", 404),
        ("/v1/projects/p/secrets/s/versions/2:access", 404),
        ("/v1/projects/p/secrets/forbidden/versions/1:access", 403),
    ],
)
def test_secret_manager_gives_a_version_to_who_may_read_it(receiver: Receiver, path: str, code: int) -> None:
    found, answer = ask(receiver.endpoint, "GET", path)
    assert found == code and (code != 200 or base64.b64decode(answer["payload"]["data"]) == b"s3cret")


def test_a_webhook_takes_json_and_nothing_else(receiver: Receiver) -> None:
    receiver.codes = [500]
    assert ask(receiver.endpoint, "POST", "/hook", {"text": "a"})[0] == 500
    assert ask(receiver.endpoint, "POST", "/hook", {"text": "b"}, kind="text/plain")[0] == 415
    assert ask(receiver.endpoint, "POST", "/hook", {"text": "c"})[0] == 200
    assert receiver.messages == [{"text": "c"}]
