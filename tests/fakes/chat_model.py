"""What a strict server of OpenAI's chat completions answers: a script of answers, with every request checked."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image

KNOWN = {"model", "messages", "max_tokens", "temperature"}


class Refused(Exception):
    """An HTTP status other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def chat_completion(body: bytes, name: str, answer: Callable[[str], str]) -> dict[str, Any]:
    """The response to a request for the model `name`, which answers a question's text. Raises Refused.

    Strict: fields other than those that we send, sampling, and images that do not decode are refused.
    """
    try:
        request = json.loads(body)
    except ValueError as error:
        raise Refused(400, f"no JSON: {error}") from None
    if set(request) != KNOWN:
        raise Refused(400, f"fields {sorted(set(request) ^ KNOWN)}")
    if request["model"] != name:
        raise Refused(404, f"The model `{request['model']}` does not exist.")
    if request["temperature"] != 0 or not request["max_tokens"] > 0:
        raise Refused(400, "a greedy answer of some length is asked for here")
    *before, user = request["messages"]
    if [one["role"] for one in before] not in ([], ["system"]) or user["role"] != "user":
        raise Refused(400, "roles")
    texts = []
    for part in user["content"]:
        if part["type"] == "image_url":
            head, _, data = part["image_url"]["url"].partition(";base64,")
            try:
                image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
                image.load()
            except (ValueError, OSError) as error:
                raise Refused(400, f"no image: {error}") from None
            if head != f"data:image/{str(image.format).lower()}":
                raise Refused(400, f"{head} with an image in {image.format}")
        elif part["type"] == "text":
            texts.append(part["text"])
        else:
            raise Refused(400, f"a part of type {part['type']}")
    message = {"role": "assistant", "content": answer("".join(texts))}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


class ChatModelServer:
    """The server, on a free port. `refuses` is the status of all answers from now on."""

    def __init__(self, name: str, answer: Callable[[str], str]) -> None:
        self.name, self.answer, self.refuses, self.asked = name, answer, 0, 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/chat/completions"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> ChatModelServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(fake: ChatModelServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            fake.asked += 1
            try:
                if fake.refuses:
                    raise Refused(fake.refuses, "no capacity")
                if self.path != "/v1/chat/completions":
                    raise Refused(404, "Not Found")
                status, content = 200, chat_completion(body, fake.name, fake.answer)
            except Refused as error:
                status, content = error.status, {"error": {"message": error.message}}
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
