"""Where figures come from: command, machine, load and versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

VERSIONED = (
    "torch", "transformers", "accelerate", "deepspeed", "webdataset", "numpy", "pillow", "safetensors", "tokenizers",
)  # fmt: skip
OUTPUT_OPTIONS = ("--json", "--markdown")
SHARED_ABOVE_LOAD = 1.5  # this process is one of the load


def environment(title: str, load_at_start: float) -> dict[str, Any]:
    """What is needed to judge figures and to repeat them."""
    load = max(load_at_start, os.getloadavg()[0])
    return {
        "title": title,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": _command(),
        "machine": _machine(),
        "shared": f"load {load:.1f}" + (", shared with other work" if load > SHARED_ABOVE_LOAD else ""),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _machine() -> str:
    """The machine in neutral words: cores and kind of processor."""
    info = Path("/proc/cpuinfo")
    names = (
        re.findall(r"^model name\s*: (.+)$", info.read_text(encoding="utf-8"), re.MULTILINE) if info.exists() else []
    )
    name = re.sub(r"\(R\)|\(TM\)|CPU|Processor|@.*", "", names[0] if names else platform.machine())
    return f"{os.cpu_count()} cores of an {' '.join(name.split())}, {platform.system()}"


def _versions() -> dict[str, str]:
    found = {package.metadata["Name"].lower(): package.version for package in importlib.metadata.distributions()}
    return {name: found[name] for name in VERSIONED if name in found}


def _command() -> str:
    """The command as a reader can repeat it: without where this run wrote its files."""
    given, kept = iter(sys.argv[1:]), []
    for argument in given:
        if argument in OUTPUT_OPTIONS:
            next(given)
        elif not argument.startswith(tuple(f"{option}=" for option in OUTPUT_OPTIONS)):
            kept.append(argument)
    return " ".join([f"python -m benchmarks.{Path(sys.argv[0]).stem}", *kept])
