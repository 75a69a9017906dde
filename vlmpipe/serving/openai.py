"""Client for a server that speaks OpenAI's chat completions, such as vLLM's and `transformers serve`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmpipe.serving.questions import Chat
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.redaction import redact

CHAT_PATH = "/chat/completions"  # behind a server's address, which ends in /v1
MOST_CHARS = 300  # of a server's message in ours
END_OF_THINKING = "</think>"  # as evaluation: an answer is what comes behind
ANSWER_S = 120.0


@dataclass(frozen=True)
class Answer:
    """An answer, and the server's headers beside it, with lower-case names."""

    text: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatServer:
    """Where questions go. `headers` are made anew for each request, since tokens run out."""

    url: str
    model: str
    headers: Callable[[], dict[str, str]] = dict
    timeout_s: float = ANSWER_S

    def ask(self, messages: Chat, max_new_tokens: int) -> Answer:
        """The greedy answer. Raises UserError for a server that cannot be reached, refuses, or answers otherwise."""
        headers = {"Content-Type": "application/json", **self.headers()}
        request = urllib.request.Request(self.url, request_body(self.model, messages, max_new_tokens), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                content, found = reply.read(), {name.lower(): value for name, value in reply.headers.items()}
        except urllib.error.HTTPError as error:
            raise refusal(self.url, error.code, error.read().decode(errors="replace")) from error
        except OSError as error:
            why = getattr(error, "reason", error)
            raise _unusable(f"{self.url} does not answer: {redact(str(why))}") from error
        return Answer(_text(self.url, content), found)


def request_body(model: str, messages: Chat, max_new_tokens: int) -> bytes:
    """The request that asks for a greedy answer."""
    body = {"model": model, "messages": messages, "max_tokens": max_new_tokens, "temperature": 0.0}
    return json.dumps(body).encode()


def refusal(url: str, status: int, said: str) -> UserError:
    """The error for an HTTP status other than 200."""
    said = redact(" ".join(said.split()))[:MOST_CHARS]
    found = f"{url} refuses the request: {status} {said}"
    if status in (401, 403):
        fix = "give the account that asks the right to call the endpoint"
        return UserError(found, expected="an endpoint that answers questions", fix=fix, code=ExitCode.NO_PERMISSION)
    return _unusable(found)


def _unusable(found: str) -> UserError:
    return UserError(
        found,
        expected="an OpenAI-compatible server that answers questions about images",
        fix="look into the server's log, or at the address",
        code=ExitCode.UNAVAILABLE,
    )


def _text(url: str, content: bytes) -> str:
    try:
        message: Any = json.loads(content)["choices"][0]["message"]["content"]
        return str(message or "").rpartition(END_OF_THINKING)[2].strip()
    except (ValueError, LookupError, TypeError) as error:
        said = redact(content[:MOST_CHARS].decode(errors="replace"))
        raise _unusable(f"{url} answers with something else than a chat completion: {said!r}") from error
