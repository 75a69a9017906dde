"""Writes the skill folder. What is there with another content is never overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vlmpipe.cli.init import create
from vlmpipe.trainer.errors import ConfigError, os_errors
from vlmpipe.trainer.storage.regular_files import FileTooLargeError, NotRegularFileError, read_regular


def write_folder(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Write the files that are not there yet. Returns them.

    Raises ConfigError, before anything is written, that lists files with another content.
    """
    missing = {folder / name: text for name, text in files.items() if not _is_there(folder / name)}
    if other := [
        folder / name for name, text in files.items() if folder / name not in missing and _differs(folder / name, text)
    ]:
        raise ConfigError(
            "\n".join([f"{folder} has files of another content", *(f"  {path}" for path in other)]),
            expected="no such files, or those of this version of vlmpipe",
            fix="look at them and remove them, or write another folder: --output FOLDER",
        )
    for path, text in missing.items():
        with os_errors(f"writing {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
        create(path, text)
    return list(missing)


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _differs(path: Path, text: str) -> bool:
    if not path.is_file():  # a folder, or a link that leads nowhere
        return True
    content = text.encode()
    with os_errors(f"reading {path}"):
        try:
            return read_regular(path, len(content)) != content
        except (FileTooLargeError, NotRegularFileError):
            return True
