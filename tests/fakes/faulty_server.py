"""Faults that tests inject into the answers of a local server."""

from __future__ import annotations

import threading
from typing import Any

from vlmpipe.rehearsal.http_server import LocalServer


class FaultyServer(LocalServer):
    """A local server that breaks chosen requests on purpose."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.faults: list[Any] = []  # each has `times` and `matches(method, path, body)`
        self.closing = threading.Event()

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        super().__exit__()

    def take_fault(self, method: str, path: str, body: bytes) -> Any:
        """The first fault for this request, which then has one time less; None without any."""
        with self.lock:
            fault = next((one for one in self.faults if one.times > 0 and one.matches(method, path, body)), None)
            if fault:
                fault.times -= 1
            return fault
