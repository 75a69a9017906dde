"""What a test may break of the requests to the stand-in for Cloud Storage."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Action = Literal[
    "status", "drop_before", "drop_after", "truncate", "corrupt", "corrupt_request", "stall", "stall_midway", "trickle"
]


@dataclass
class Fault:
    """Break the next `times` requests whose method and path match.

    status: answer `code` and do nothing. drop_before: close the connection, nothing done. drop_after: do it, then close
    without an answer. truncate: send half of the body. corrupt: flip one bit of the body, checksums as they were.
    corrupt_request: flip the last bit of an object's bytes before they are looked at. stall: do nothing and keep the
    connection open without an answer. stall_midway: do it, send half of the body and keep the connection open.
    trickle: do it, and send the body in pieces with pauses, as a slow network does.

    An upload names its object in its body and not in its path: `body`, searched near the start, is how to meet one.
    """

    action: Action
    method: str = ".*"
    path: str = ".*"
    times: int = 1
    code: int = 503
    retry_after_s: int | None = None  # of a status: the header Retry-After
    body: str = ""

    def matches(self, method: str, path: str, body: bytes) -> bool:
        if not re.fullmatch(self.method, method) or not re.search(self.path, path):
            return False
        return re.search(self.body, body[:1000].decode("latin-1")) is not None
