"""Folders of the user: `~`, and a cache for where the user has no home.

A container may run as a number without an entry in /etc/passwd and without HOME (OpenShift does so by default). `~`
then has no meaning, and Python's `Path.home` raises RuntimeError.
"""

from __future__ import annotations

from pathlib import Path

from vlmpipe.trainer.errors import ConfigError


def expanded(path: str | Path) -> Path:
    """The path with its `~` replaced. Raises ConfigError where that user has no home; other paths need none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{path} begins with ~, and this user has no home: HOME is not set and no line of /etc/passwd names one",
            expected="a user with a home, or a path without ~",
            fix="write the whole path, or set HOME",
        ) from error


def cache_of_user() -> Path | None:
    """`~/.cache/vlmpipe`, which need not exist; None where the user has no home."""
    try:
        return Path.home() / ".cache/vlmpipe"
    except RuntimeError:
        return None
