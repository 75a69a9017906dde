"""What a server of chat completions answers to right and wrong requests: recorded from real vLLM, kept by the fakes.

`make test-engines` compares the record with the server, and leaves what it found in build/chat_contract.json.
"""

from __future__ import annotations

import base64
import io
import json
import re
import urllib.error
import urllib.request
from typing import Any

from PIL import Image

from tests.support.paths import ROOT

RECORD = ROOT / "tests/fixtures/chat_contract.json"
FOUND = ROOT / "build/chat_contract.json"
CONTEXT = 512  # tokens of the model that is asked
Request = dict[str, Any]


def picture(kind: str = "png", *, called: str = "") -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 24), "red").save(buffer, kind)
    return f"data:image/{called or kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def shown(url: str) -> Request:
    return {"type": "image_url", "image_url": {"url": url}}


def asked(*content: Request, **changes: Any) -> Request:
    """A request of ours, but for what is changed; a field that is None is left out."""
    parts = [*content, {"type": "text", "text": "what is this?"}]
    whole = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0.0} | changes
    return {name: value for name, value in whole.items() if value is not None}


LONG = [{"role": "user", "content": "word " * 3000}]
# Of each case the path, and the request without a model's name, which is added where there is none.
CASES: dict[str, tuple[str, Request | None]] = {
    "an answer": ("/v1/chat/completions", asked(shown(picture()))),
    "two images": ("/v1/chat/completions", asked(shown(picture()), shown(picture()))),
    "no image": ("/v1/chat/completions", asked()),
    "an image of another type than it is called": ("/v1/chat/completions", asked(shown(picture("jpeg", called="png")))),
    "an unknown model": ("/v1/chat/completions", asked(model="other")),
    "no name of a model": ("/v1/chat/completions", asked(model="")),
    "no messages": ("/v1/chat/completions", asked(messages=None)),
    "a long prompt": ("/v1/chat/completions", asked(messages=LONG)),
    "too many images": ("/v1/chat/completions", asked(*[shown(picture())] * 200)),
    "max_tokens beyond the context": ("/v1/chat/completions", asked(max_tokens=CONTEXT + 1)),
    "max_tokens 0": ("/v1/chat/completions", asked(max_tokens=0)),
    "bytes that are no image": ("/v1/chat/completions", asked(shown("data:image/png;base64,bm8gcGljdHVyZQ=="))),
    "no base64": ("/v1/chat/completions", asked(shown("data:image/png;base64,?"))),
    "a stream": ("/v1/chat/completions", asked(shown(picture()), stream=True)),
    "another path": ("/v1/other", asked()),
    "a request without content": ("/v1/chat/completions", None),
}


def answers_of(server: str, model: str) -> dict[str, Any]:
    """Status, type and error of each case. server: its address without a path."""
    return {name: _answer(server + path, request, model) for name, (path, request) in CASES.items()}


def _answer(url: str, request: Request | None, model: str) -> dict[str, Any]:
    data = None
    if request is not None:
        named = {"model": model} | request
        data = json.dumps({name: value for name, value in named.items() if (name, value) != ("model", "")}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as reply:
            status, kind, content = reply.status, reply.headers["Content-Type"], reply.read()
    except urllib.error.HTTPError as error:
        status, kind, content = error.code, error.headers["Content-Type"], error.read()
    found: dict[str, Any] = {"status": status, "content_type": kind}
    if status == 200:
        if kind.startswith("application/json"):
            (choice,) = json.loads(content)["choices"]
            found["content"] = type(choice["message"]["content"]).__name__
            found["finish_reasons"] = choice["finish_reason"] in ("stop", "length")
        else:
            found["ends_with"] = content.decode().strip().splitlines()[-1]
        return found
    said = json.loads(content)
    if "error" in said:
        said["error"]["message"] = general(said["error"]["message"].replace(model, "MODEL"))
    return found | {"body": said}


def general(message: str) -> str:
    """The message without its numbers and addresses of objects, which differ from server to server."""
    return re.sub(r"\d+", "N", re.sub(r"0x[0-9a-f]+", "N", message))
