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
from vlmpipe.trainer.printable import one_line
from vlmpipe.trainer.redaction import redact

CHAT_PATH = "/chat/completions"  # after a server's address, which ends in /v1
MAX_CHARS = 300  # of a server's message in ours
END_OF_THINKING = "</think>"  # as evaluation: an answer is what comes after
ANSWER_S = 120.0
ADDRESS = (404, 405)  # statuses of another address, and of a model that is not served
LATER = (408, 425, 429)  # statuses of requests that may be repeated


@dataclass(frozen=True)
class Answer:
    """An answer without white space around it, and the server's headers beside it, with lower-case names.

    finish_reason: the server's, "stop" or "length"; empty where it gives none. has_space: the server's text begins or
    ends with white space.
    """

    text: str
    finish_reason: str = ""
    has_space: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatServer:
    """The server that answers questions. `headers` makes new headers for each request, since tokens expire."""

    url: str
    model: str
    headers: Callable[[], dict[str, str]] = dict
    timeout_s: float = ANSWER_S

    def ask(self, messages: Chat, max_new_tokens: int) -> Answer:
        """The greedy answer.

        Raises UserError (64 to 69, 77) for a server that cannot be reached, refuses, or answers otherwise.
        """
        headers = {"Content-Type": "application/json", **self.headers()}
        request = urllib.request.Request(self.url, request_body(self.model, messages, max_new_tokens), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                content, received = reply.read(), {name.lower(): value for name, value in reply.headers.items()}
        except urllib.error.HTTPError as error:
            raise refusal(self.url, error.code, error.read().decode(errors="replace")) from error
        except OSError as error:
            why = getattr(error, "reason", error)
            raise _unusable(f"{self.url} does not answer: {redact(str(why))}") from error
        return answer_in(self.url, content, received)


def request_body(model: str, messages: Chat, max_new_tokens: int) -> bytes:
    """The request that asks for a greedy answer."""
    body = {"model": model, "messages": messages, "max_tokens": max_new_tokens, "temperature": 0.0}
    return json.dumps(body).encode()


def refusal(url: str, status: int, body: str) -> UserError:
    """The error for an HTTP status other than 200, with the server's own sentence.

    77 without the right to ask; 64 where the address or the model's name is another; 65 where the server does not take
    the request, such as for a prompt that is too long; 69 for a server that may take it later.
    """
    problem = f"{url} refuses the request: {status} {_sentence(body)}"
    if status in (401, 403):
        fix = "give the account that asks the right to call the endpoint"
        return UserError(problem, expected="an endpoint that answers questions", fix=fix, code=ExitCode.NO_PERMISSION)
    if status in ADDRESS:
        fix = f"give the address that ends in /v1{CHAT_PATH}, and a name that the server's /v1/models lists"
        return UserError(problem, expected="chat completions of a model that is served there", fix=fix)
    if 400 <= status < 500 and status not in LATER:
        return UserError(
            problem,
            expected="a request within the limits that the server was started with",
            fix="the server's sentence says which; vLLM takes them from the model's context, --max-model-len and "
            "--limit-mm-per-prompt, a run's questions from data.sequence_length and evaluate.max_new_tokens",
            code=ExitCode.DATA,
        )
    return _unusable(problem)


def _sentence(body: str) -> str:
    """The message of an error as vLLM, FastAPI or Google's APIs write it, or else all that was said."""
    try:
        content: Any = json.loads(body)
        message = content["error"]["message"] if "error" in content else content["detail"]
    except (ValueError, LookupError, TypeError):
        message = body
    return redact(" ".join(one_line(str(message)).split()))[:MAX_CHARS]


def _unusable(problem: str) -> UserError:
    return UserError(
        problem,
        expected="an OpenAI-compatible server that answers questions about images",
        fix="look into the server's log, or at the address",
        code=ExitCode.UNAVAILABLE,
    )


def answer_in(url: str, content: bytes, headers: Mapping[str, str]) -> Answer:
    """The answer in a chat completion. Raises UserError (69) for something else."""
    try:
        choice: Any = json.loads(content)["choices"][0]
        text = str(choice["message"]["content"] or "").rpartition(END_OF_THINKING)[2]
        return Answer(text.strip(), str(choice.get("finish_reason") or ""), text != text.strip(), headers)
    except (ValueError, LookupError, TypeError) as error:
        shown = redact(content[:MAX_CHARS].decode(errors="replace"))
        raise _unusable(f"{url} answers with something else than a chat completion: {shown!r}") from error
