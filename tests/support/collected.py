"""The process from which the workers of a test run are forked: it has imported all that the tests import.

That takes a third of a minute of a processor; what is left to a worker is to collect the tests again, a fifth of it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.fork_server import forked_python, serve, start_at

if TYPE_CHECKING:
    import execnet


def fork_workers(config: pytest.Config, specs: Sequence[execnet.XSpec]) -> None:
    """Let xdist start its workers on this machine as forks of one process, also those that replace others."""
    server = Path(tempfile.mkdtemp(prefix="vlmpipe-workers-"), "server")
    arguments = [str(argument) for argument in config.invocation_params.args]
    start_at(server, __name__, str(config.invocation_params.dir), *arguments)
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = shlex.join(forked_python(server))


class Warnings:
    """Prints what workers cannot report: warnings of the imports, each once."""

    def __init__(self) -> None:
        self._printed: set[str] = set()

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        """Called by pytest."""
        category, place = warning_message.category.__name__, f"{warning_message.filename}:{warning_message.lineno}"
        line = f"{place}: {category}: {warning_message.message}"
        if line not in self._printed:
            print(line, file=sys.__stderr__, flush=True)
        self._printed.add(line)


def collect(folder: str, arguments: list[str]) -> None:
    """Import what a worker would that gets these arguments. It reports what fails in that."""
    os.chdir(folder)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        pytest.main([*arguments, "--numprocesses=0", "--collect-only", "-qq", "--junitxml="], plugins=[Warnings()])


if __name__ == "__main__":
    listening = socket.socket(fileno=int(sys.argv[1]))
    address = Path(listening.getsockname())
    collect(sys.argv[3], sys.argv[4:])
    serve(listening, int(sys.argv[2]))
    address.parent.rmdir()
