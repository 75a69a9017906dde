"""Takes the progress that transformers' Trainer posts every few seconds, on this machine only.

It is for showing, never for judging: the Trainer says 100 % also when it ends early, and the loss beside a step is that
of the last step that was logged. What decides, and metrics.jsonl, come from the program's files.
"""

from __future__ import annotations

import hmac
import http.server
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from vlmpipe.trainer.external.follow import json_object
from vlmpipe.trainer.monitoring.train_job_status import TOKEN, URL
from vlmpipe.trainer.threads import start_thread

MAX_BODY_BYTES = 64 << 10
ANSWER_LIMIT_S = 5.0  # for a client that does not send what it announced


@dataclass(frozen=True)
class Posted:
    """Values posted last; 0 and None for what it did not name."""

    step: int = 0
    total_steps: int = 0
    loss: float | None = None


def platform_has_one(environment: Mapping[str, str]) -> bool:
    """Return whether a TrainJob's controller wants the progress for itself."""
    return URL in environment


class ProgressEndpoint:
    """A server on the loopback interface, for as long as the block takes."""

    def __init__(self, folder: Path) -> None:
        self.posted = Posted()
        self._token = secrets.token_urlsafe(32)
        self._token_file = folder / "progress-token"
        self._token_file.touch(mode=0o600)
        self._token_file.write_text(self._token, encoding="utf-8")
        self._server = http.server.HTTPServer(("127.0.0.1", 0), self._handler())

    def __enter__(self) -> ProgressEndpoint:
        start_thread(self._server.serve_forever, name="progress-endpoint")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def variables(self) -> dict[str, str]:
        """By which transformers finds it. Proxies are for other hosts."""
        hosts = [name for name in (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1") if name]
        return {
            URL: f"http://127.0.0.1:{self._server.server_port}/",
            TOKEN: str(self._token_file),
            "no_proxy": ",".join(hosts),
        }

    def take(self, authorization: str, body: bytes) -> int:
        """Note a posted report. Returns the HTTP status: 200, 401 for a wrong token, 400 for another form."""
        if not hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode()):
            return 401
        status = json_object(body).get("trainerStatus")
        metrics = status.get("metrics", []) if isinstance(status, dict) else None
        if not isinstance(metrics, list):
            return 400
        values = {
            str(metric.get("name")): _number(metric.get("value")) for metric in metrics if isinstance(metric, dict)
        }
        step, total, loss = (values.get(name) for name in ("current_step", "total_steps", "loss"))
        last = self.posted
        self.posted = Posted(
            max(last.step, int(step or 0)), int(total or last.total_steps), last.loss if loss is None else loss
        )
        return 200

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        take = self.take

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = ANSWER_LIMIT_S

            def do_POST(self) -> None:
                length = self.headers.get("Content-Length", "")
                if not (length.isascii() and length.isdigit()):
                    code = 411
                elif int(length) > MAX_BODY_BYTES:
                    code = 413
                else:
                    code = take(self.headers.get("Authorization", ""), self.rfile.read(int(length)))
                self.send_response(code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: the log is the program's."""

        return Handler


def _number(value: object) -> float | None:
    if not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
