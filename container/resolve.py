"""What pip would install, and the digest of each file of it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def resolved(arguments: Iterable[str]) -> list[Mapping[str, Any]]:
    """The installations of pip's report, by `pip install` with these arguments. Nothing is installed."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        subprocess.run([*command, "--report", report.name, *arguments], check=True)
        found: list[Mapping[str, Any]] = json.loads(Path(report.name).read_text(encoding="utf-8"))["install"]
        return found


def digest(installation: Mapping[str, Any]) -> str:
    """pip's option for the digest of the file that would be installed."""
    return f"--hash=sha256:{installation['download_info']['archive_info']['hashes']['sha256']}"
