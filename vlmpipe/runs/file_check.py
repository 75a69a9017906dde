"""Reads every file that a run rests on, or left, and compares it with the checksum that was written with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from trainer.checkpoint.export_manifest import FOLDER as EXPORT
from trainer.checkpoint.export_manifest import require_whole_export
from trainer.config.job import DataPointers
from trainer.data.shards.prepared_files import Manifest
from trainer.data.shards.verified_files import mismatch
from trainer.errors import UserError
from trainer.feature_cache.reader import FeatureShards
from trainer.storage import open_storage


@dataclass(frozen=True)
class FileCheck:
    """One part of a run. `problem` names the first damaged file; empty where all are whole."""

    part: str
    uri: str
    files: int = 0
    problem: str = ""

    def line(self) -> str:
        """For people."""
        return f"{self.part:<14} {self.problem or f'whole, {self.files:,} files'}   {self.uri}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def check_files(run_uri: str) -> Iterator[FileCheck]:
    """Prepared data, features and export of a run, as far as it came: a part that is not there yet is left out."""
    run = open_storage(run_uri)
    if run.stat("prepared.json"):
        pointers = DataPointers.model_validate(json.loads(run.read("prepared.json")))
        yield _checked("prepared data", pointers.prepared_uri, _prepared)
        if pointers.features != "off":
            yield _checked("features", pointers.features_uri, _features)
    if run.list(EXPORT):
        yield _checked("export", run_uri, lambda uri: len(require_whole_export(open_storage(uri))["files"]))


def _checked(part: str, uri: str, count: Any) -> FileCheck:
    try:
        return FileCheck(part, uri, files=count(uri))
    except UserError as error:
        return FileCheck(part, uri, problem=error.found)


def _prepared(uri: str) -> int:
    storage = open_storage(uri)
    manifest = Manifest.read(storage)
    if damaged := manifest.damaged(storage):
        more = f" and {len(damaged) - 1} more files" if damaged[1:] else ""
        raise UserError(f"damaged or missing: {damaged[0]}{more}")
    return len(manifest.files)


def _features(uri: str) -> int:
    shards = FeatureShards(uri)
    for name in shards.names:
        if problem := mismatch(shards.storage.fetch(name), shards.sidecar(name)):
            raise shards.damaged(name, problem)
    return len(shards.names)
