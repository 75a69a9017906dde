"""The description of an exported model, with checksums of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.storage.base import ObjectInfo, Storage
from vlmpipe.trainer.storage.file_sums import FileSum
from vlmpipe.trainer.storage.records import unseal, write_record

FOLDER = "export"  # in a run
MARKER = "vlmpipe.json"
NAME = f"{FOLDER}/{MARKER}"


def quantized_folder(form: str) -> str:
    """Folder of a run's quantized export, by the format of its weights."""
    return f"{FOLDER}-{form}"


def marker_of(folder: str) -> str:
    return f"{folder}/{MARKER}"


def write_description(run: Storage, described: dict[str, object], folder: str = FOLDER) -> None:
    """Complete the export in `folder`. `described["files"]` has the size and CRC32C of each file."""
    write_record(run, marker_of(folder), described)


def require_whole_export(run: Storage, folder: str = FOLDER) -> dict[str, Any]:
    """The description of a run's export, after checking its files. Raises DataError for none or a damaged one."""
    if run.stat(marker_of(folder)) is None:
        is_quantized = folder != FOLDER
        raise DataError(
            f"there is no exported model in {run.uri(folder)}",
            expected=f"a whole export, with {MARKER}",
            fix="ask for its format in evaluate.quantize, and see in evaluate.json whether it was accepted"
            if is_quantized
            else "run the sync_checkpoint step first",
        )
    files = run.list(folder)
    described = require_described(run, files, f"{folder}/")
    unlisted = {info.name for info in files} - {f"{folder}/{name}" for name in (MARKER, *described["files"])}
    if unlisted:
        raise _damaged(run, min(unlisted), f"{MARKER} does not list it")
    return described


def link_export(run: Storage, folder: Path, export: str = FOLDER) -> None:
    """Link the files of a run's export, in its folder `export`, into a folder on this machine."""
    for info in run.list(export):
        (folder / Path(info.name).name).symlink_to(run.fetch(info.name).resolve())


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
