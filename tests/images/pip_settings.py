"""pip's configuration on this machine, as a file to hand to a build, and the folders that it names."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PipSettings:
    """What pip is told here, by files and by the environment."""

    text: str  # a pip.conf
    mounts: tuple[Path, ...]  # read by pip while an image is built, at the same place there
    traces: tuple[str, ...]  # addresses and folders, which no image may mention


def pip_settings(listed: str | None = None) -> PipSettings:
    """Read `pip config list`; what the environment sets (`:env:`) goes before what files set."""
    if listed is None:
        command = [sys.executable, "-m", "pip", "config", "list"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sections: dict[str, dict[str, str]] = {}
    from_environment: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, quoted = line.partition("=")
        section, _, key = name.rpartition(".")
        value = str(ast.literal_eval(quoted))
        if section == ":env:":
            from_environment[key] = value
        else:
            sections.setdefault(section, {})[key] = value
    sections.setdefault("global", {}).update(from_environment)
    lines = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{key} = {' '.join(value.split())}" for key, value in values.items())]
    words = {word for values in sections.values() for value in values.values() for word in value.split()}
    places = sorted(word for word in words if "/" in word)
    certificates = {values["cert"] for values in sections.values() if "cert" in values}
    return PipSettings(
        text="\n".join(lines) + "\n",
        mounts=tuple(sorted({mount for place in places for mount in _mounts(place)})),
        traces=tuple(place for place in places if place not in certificates),
    )


def _mounts(place: str) -> list[Path]:
    """A local index refers to files beside it, so its parent folder is needed."""
    path = Path(place.removeprefix("file://"))
    if not path.is_absolute() or not path.exists():
        return []
    return [path.parent if place.startswith("file://") else path]
