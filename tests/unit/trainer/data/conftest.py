"""Tests of prepared data write many small files, each of which is flushed: their folders are in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.data.web_server import HOST, WebServer, web_server
from vlmpipe.trainer.data.fetching import web_address


@pytest.fixture
def tmp_path(memory: Path) -> Path:
    return memory


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A web server on this machine, which is asked as if it were public."""
    is_public = web_address.is_public
    monkeypatch.setattr(web_address, "is_public", lambda ip: ip == HOST or is_public(ip))
    with web_server() as server:
        yield server
