"""What vLLM's server of chat completions answers, from a script of answers, with every request checked.

Its statuses and errors are those of the real server: tests/fixtures/chat_contract.json records them, and
tests/unit/fakes/test_chat_model.py compares. It is stricter in one way: what our client never sends is refused.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from PIL import Image, UnidentifiedImageError

from vlmpipe.rehearsal.http_server import HttpServer

PATH = "/v1/chat/completions"
KNOWN = {"model", "messages", "max_tokens", "temperature", "stream"}
CONTEXT, IMAGE_TOKENS = 512, 4  # tokens that the model takes, and those of an image
MAX_CHARS = 10 * CONTEXT  # of a text that is looked at at all


class Refused(Exception):
    """An HTTP status other than 200, and the content of the answer."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.content: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def chat_completion(body: bytes, name: str, answer: Callable[[str], str]) -> dict[str, Any]:
    """The response to a request for the model `name`, which answers a question's text. Raises Refused."""
    try:
        request = json.loads(body)
    except ValueError as error:
        raise Refused(400, f"no JSON: {error}") from None
    if not request.keys() <= KNOWN:
        raise Refused(400, f"fields {sorted(request.keys() - KNOWN)}, which our client does not send")
    if "messages" not in request:
        missing = {"type": "missing", "loc": "body.messages", "msg": "Field required"}
        missing["input"] = f"<dict of {len(request)} items>"
        raise Refused(400, f"1 validation error:\n  {missing}", "Bad Request", "body.messages")
    if request.get("model", name) != name:
        text = f"The model `{request['model']}` does not exist. Valid aliases: {name}."
        raise Refused(404, text, "NotFoundError", "model")
    if request["temperature"] != 0:
        raise Refused(400, "our client asks for greedy answers")
    most = request["max_tokens"]
    if most < 1:
        text = f"max_tokens must be at least 1, got {most}. (parameter=max_tokens, value={most})"
        raise Refused(400, text, param="max_tokens")
    if most > CONTEXT:
        raise Refused(
            400,
            f"max_tokens={most} cannot be greater than max_model_len={CONTEXT}. Please request fewer output tokens. "
            f"(parameter=max_tokens, value={most})",
            param="max_tokens",
        )
    text, images = _read(request["messages"])
    if len(text) > MAX_CHARS:
        raise Refused(
            400,
            f"This model's maximum context length is {CONTEXT} tokens. However, your prompt contains {len(text)} "
            f"characters (more than {MAX_CHARS} characters, which is the upper bound for {CONTEXT} input tokens). "
            f"Please reduce the length of the input prompt. (parameter=input_text, value={len(text)})",
            param="input_text",
        )
    if (length := len(text.split()) + images * IMAGE_TOKENS) > CONTEXT:
        raise Refused(400, f"Input length ({length}) exceeds model's maximum context length ({CONTEXT}).")
    message = {"role": "assistant", "content": answer(text)}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def _read(messages: list[dict[str, Any]]) -> tuple[str, int]:
    """The question's text, and how many images it has."""
    *before, user = messages
    if [one["role"] for one in before] not in ([], ["system"]) or user["role"] != "user":
        raise Refused(400, "roles that our client does not send")
    if isinstance(user["content"], str):
        return user["content"], 0
    texts, images = [], 0
    for part in user["content"]:
        if part["type"] == "text":
            texts.append(part["text"])
            continue
        if part["type"] != "image_url":
            raise Refused(400, f"a part of type {part['type']}, which our client does not send")
        data = part["image_url"]["url"].partition(";base64,")[2]
        try:
            Image.open(io.BytesIO(base64.b64decode(data, validate=True))).load()
        except binascii.Error:
            raise Refused(400, "Non-base64 digit found") from None
        except UnidentifiedImageError:
            raise Refused(400, "Failed to load image: cannot identify image file <_io.BytesIO object>") from None
        images += 1
    return "".join(texts), images


class ChatModelServer(HttpServer):
    """The server, on a free port. `refuses` is the status of all answers from now on."""

    def __init__(self, name: str, answer: Callable[[str], str]) -> None:
        super().__init__(_handler(self))
        self.name, self.answer, self.refuses, self.asked = name, answer, 0, 0
        self.url = f"{self.endpoint}{PATH}"


def _handler(fake: ChatModelServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(405, json.dumps({"detail": "Method Not Allowed"}))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            fake.asked += 1
            if self.path != PATH:
                self._send(404, json.dumps({"detail": "Not Found"}))
                return
            try:
                if fake.refuses:
                    raise Refused(fake.refuses, "no capacity")
                content = chat_completion(body, fake.name, fake.answer)
            except Refused as error:
                self._send(error.status, json.dumps(error.content))
                return
            if json.loads(body).get("stream"):
                chunk = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "?"}}]}
                events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
                self._send(200, events, "text/event-stream; charset=utf-8")
                return
            self._send(200, json.dumps(content))

        def _send(self, status: int, content: str, kind: str = "application/json") -> None:
            data = content.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
