"""The description of an exported model, with checksums of its files."""

from __future__ import annotations

from typing import Any

from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.storage.base import ObjectInfo, Storage
from vlmpipe.trainer.storage.file_sums import FileSum
from vlmpipe.trainer.storage.records import unseal, write_record

FOLDER = "export"  # in a run
MARKER = "vlmpipe.json"
NAME = f"{FOLDER}/{MARKER}"


def write_description(run: Storage, described: dict[str, object]) -> None:
    """Complete the export. `described["files"]` has the size and CRC32C of each file."""
    write_record(run, NAME, described)


def require_whole_export(run: Storage) -> dict[str, Any]:
    """The description of a run's export, after checking its files. Raises DataError for none or a damaged one."""
    if run.stat(NAME) is None:
        raise DataError(
            f"there is no exported model in {run.uri(FOLDER)}",
            expected=f"a whole export, with {MARKER}",
            fix="run the sync_checkpoint step first",
        )
    files = run.list(FOLDER)
    described = require_described(run, files, f"{FOLDER}/")
    unlisted = {info.name for info in files} - {f"{FOLDER}/{name}" for name in (MARKER, *described["files"])}
    if unlisted:
        raise _damaged(run, min(unlisted), f"{MARKER} does not list it")
    return described


def require_described(store: Storage, files: list[ObjectInfo], prefix: str = "") -> dict[str, Any]:
    """The description among the files of an export, after checking those it lists. Raises DataError for damage."""
    marker = f"{prefix}{MARKER}"
    try:
        described = unseal(store.read(marker), required=True)
    except ValueError as error:
        raise _damaged(store, marker, str(error)) from error
    there = {info.name: info for info in files}
    for name, sums in described["files"].items():
        if f"{prefix}{name}" not in there:
            raise _damaged(store, f"{prefix}{name}", "it is missing")
        if not FileSum(**sums).matches(store, there[f"{prefix}{name}"]):
            raise _damaged(store, f"{prefix}{name}", f"its size or checksum (CRC32C) differs from that in {MARKER}")
    return described


def _damaged(store: Storage, name: str, how: str) -> DataError:
    return DataError(
        f"{store.uri(name)} is damaged: {how}",
        expected="the export that sync_checkpoint wrote",
        fix="run sync_checkpoint again, which writes it from the checkpoint; a finished run must be repeated",
    )
