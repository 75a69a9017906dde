"""The fenced code blocks of a Markdown page."""

from __future__ import annotations

import re
from pathlib import Path

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """The blocks in one language, in order."""
    return [body for found, body in FENCE.findall(page.read_text()) if found == language]


def command_lines(page: Path) -> list[str]:
    """Every line of the page's bash blocks that is a command."""
    lines = [line.strip() for block in blocks(page, "bash") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]
