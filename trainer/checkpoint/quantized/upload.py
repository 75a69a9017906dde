"""Quantized exports in a run's folder, next to its export."""

from __future__ import annotations

from pathlib import Path

from vlmpipe.trainer.config.checkpoint import QuantizedFormat
from vlmpipe.trainer.storage.base import Storage, crc32c_of_file
from vlmpipe.trainer.storage.export_manifest import (
    NAME,
    marker_of,
    quantized_folder,
    write_description,
)
from vlmpipe.trainer.storage.records import read_record


def upload_quantized(run: Storage, folder: Path, form: QuantizedFormat) -> None:
    """Copy the files of a quantized export to the run. Its description, which is written last, makes it exist."""
    delete_quantized(run, form)
    target, files = quantized_folder(form), dict[str, dict[str, int]]()
    for path in sorted(folder.iterdir()):
        crc32c = crc32c_of_file(path)
        files[path.name] = {"bytes": path.stat().st_size, "crc32c": crc32c}
        run.upload(path, f"{target}/{path.name}", crc32c=crc32c)
    of_export = read_record(run, NAME)
    same = {name: of_export[name] for name in ("checkpoint", "step", "averaged", "is_adapter", "dtype")}
    write_description(run, {**same, "quantized": form, "files": files}, target)


def delete_quantized(run: Storage, form: QuantizedFormat) -> None:
    """Delete the run's quantized export, the description first. Nothing is deleted where there is none."""
    run.delete(marker_of(quantized_folder(form)))
    for info in run.list(quantized_folder(form)):
        run.delete(info.name)
