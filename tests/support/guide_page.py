"""The outputs in docs/how-to/from-a-guide.md: made by the commands that the page shows, on the files that it shows."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from tests.support.paths import ROOT
from vlmpipe.cli.app import app

PAGE = ROOT / "docs/how-to/from-a-guide.md"
_BLOCK = re.compile(r"(?:<!-- (?P<what>[a-z ]+): (?P<file>\S+) -->\n)?```(?P<kind>\w+)\n(?P<body>.*?)```\n", re.DOTALL)
NOT_TAKEN = re.compile(r"^# What .* cannot be expressed here:\n.*", re.MULTILINE | re.DOTALL)


def guide_page(text: str) -> str:
    """The page with the outputs of its commands."""
    with tempfile.TemporaryDirectory() as folder, _inside(Path(folder)):
        return _BLOCK.sub(_filled, text)


def _filled(block: re.Match[str]) -> str:
    whole, body, file = block[0], block["body"], block["file"]
    if block["what"] == "file":
        Path(file).write_text(body, encoding="utf-8")
    elif block["what"] == "part of":
        return (
            whole[: block.start("body") - block.start()]
            + _section(Path(file).read_text(), body.partition(":")[0])
            + "```\n"
        )
    elif block["what"] == "end of":
        end = NOT_TAKEN.search(Path(file).read_text())
        return whole[: block.start("body") - block.start()] + (end[0] if end else "") + "```\n"
    elif block["kind"] == "console":
        command = body.partition("\n")[0]
        return f"```console\n{command}\n{_output(command)}```\n"
    return whole


def _section(text: str, name: str) -> str:
    found = re.search(rf"^{name}:\n(?: .*\n|\n(?= ))*", text, re.MULTILINE)
    return f"{found[0].rstrip()}\n" if found else ""


def _output(command: str) -> str:
    program, *words = shlex.split(command.removeprefix("$ "))
    assert program == "vlmpipe"
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.stdout  # beside it, a command that takes long says what it does


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            yield
        finally:
            os.chdir(before)
