"""The description of an exported model, with checksums of its files."""

from __future__ import annotations

import json
from typing import Any

from trainer.errors import DataError
from trainer.storage.base import Storage, crc32c_of, crc32c_of_file

FOLDER = "export"  # in a run
MARKER = "vlmpipe.json"
NAME = f"{FOLDER}/{MARKER}"
OWN_SUM = "crc32c"  # of the description without this key


def write_description(run: Storage, described: dict[str, Any]) -> None:
    """Complete the export. `described["files"]` has the size and CRC32C of each file."""
    run.write(NAME, json.dumps({**described, OWN_SUM: _sum_of(described)}).encode())


def require_whole_export(run: Storage) -> dict[str, Any]:
    """The description of a run's export, after checking its files. Raises DataError for none or a damaged one."""
    if run.stat(NAME) is None:
        raise DataError(
            f"there is no exported model in {run.uri(FOLDER)}",
            expected=f"a whole export, with {MARKER}",
            fix="run the sync_checkpoint step first",
        )
    try:
        described = dict(json.loads(run.read(NAME)))
        is_whole = described.pop(OWN_SUM, None) == _sum_of(described)
    except (ValueError, TypeError):
        is_whole = False
    if not is_whole:
        raise _damaged(run, NAME, "its checksum (CRC32C) is not that of its content")
    there = {info.name: info for info in run.list(FOLDER) if info.name != NAME}
    expected = {f"{FOLDER}/{name}": sums for name, sums in described["files"].items()}
    for name in sorted(there.keys() | expected.keys()):
        if name not in there:
            raise _damaged(run, name, "it is missing")
        if name not in expected:
            raise _damaged(run, name, f"{MARKER} does not list it")
        info = there[name]
        checksum = crc32c_of_file(run.fetch(name)) if info.crc32c is None else info.crc32c
        if (info.size_bytes, checksum) != (expected[name]["bytes"], expected[name]["crc32c"]):
            raise _damaged(run, name, f"its size or checksum (CRC32C) differs from that in {MARKER}")
    return described


def _sum_of(described: dict[str, Any]) -> int:
    return crc32c_of(json.dumps(described, sort_keys=True).encode())


def _damaged(run: Storage, name: str, how: str) -> DataError:
    return DataError(
        f"{run.uri(name)} is damaged: {how}",
        expected="the export that sync_checkpoint wrote",
        fix="run sync_checkpoint again, which writes it from the checkpoint; a finished run has to be run anew",
    )
