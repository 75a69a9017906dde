"""The description of an exported model, with checksums of its files."""

from __future__ import annotations

from typing import Any

from trainer.errors import DataError
from trainer.storage.base import Storage
from trainer.storage.file_sums import FileSum
from trainer.storage.records import unseal, write_record

FOLDER = "export"  # in a run
MARKER = "vlmpipe.json"
NAME = f"{FOLDER}/{MARKER}"


def write_description(run: Storage, described: dict[str, Any]) -> None:
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
    try:
        described = unseal(run.read(NAME), required=True)
    except ValueError as error:
        raise _damaged(run, NAME, str(error)) from error
    there = {info.name: info for info in run.list(FOLDER) if info.name != NAME}
    expected = {f"{FOLDER}/{name}": sums for name, sums in described["files"].items()}
    for name in sorted(there.keys() | expected.keys()):
        if name not in there:
            raise _damaged(run, name, "it is missing")
        if name not in expected:
            raise _damaged(run, name, f"{MARKER} does not list it")
        if not FileSum(**expected[name]).matches(run, there[name]):
            raise _damaged(run, name, f"its size or checksum (CRC32C) differs from that in {MARKER}")
    return described


def _damaged(run: Storage, name: str, how: str) -> DataError:
    return DataError(
        f"{run.uri(name)} is damaged: {how}",
        expected="the export that sync_checkpoint wrote",
        fix="run sync_checkpoint again, which writes it from the checkpoint; a finished run must be repeated",
    )
