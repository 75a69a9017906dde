"""Compares every file of a run that programs read with its checksum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import get_args

from vlmpipe.records.stage_folders import STAGES_FOLDER
from vlmpipe.trainer.checkpoint.commit import FOLDER as CHECKPOINTS
from vlmpipe.trainer.checkpoint.commit import committed
from vlmpipe.trainer.checkpoint.manifest import DamagedError
from vlmpipe.trainer.checkpoint.verified_files import verify
from vlmpipe.trainer.config.benchmarks import ANSWERS_FOLDER
from vlmpipe.trainer.config.checkpoint import QuantizedFormat
from vlmpipe.trainer.data.shards.prepared_files import Manifest, why_unread
from vlmpipe.trainer.data.shards.verified_files import mismatch
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.feature_cache.reader import FeatureShards
from vlmpipe.trainer.feature_cache.store import DESCRIPTION
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.export_manifest import FOLDER as EXPORT
from vlmpipe.trainer.storage.export_manifest import quantized_folder, require_whole_export
from vlmpipe.trainer.storage.file_sums import damaged_files
from vlmpipe.trainer.storage.records import damaged_record, read_record, unseal, unseal_lines

# For people only: no program reads these, nor logs, TensorBoard's files and report.html.
UNCHECKED = ("deepspeed.json", "communication.json")


@dataclass(frozen=True)
class FileCheck:
    """One part of a run. `problem` names the first damaged file; empty where all are whole."""

    part: str
    uri: str
    files: int = 0
    problem: str = ""

    def line(self) -> str:
        return f"{self.part:<21} {self.problem or f'whole, {self.files:,} files'}   {self.uri}"

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def check_files(run_uri: str) -> Iterator[FileCheck]:
    """Check the records, prepared data, features, checkpoints and exports that the run, and each stage of it, has."""
    run = open_storage(run_uri)
    for stage in dict.fromkeys(info.name.split("/")[1] for info in run.list(STAGES_FOLDER)):
        for check in check_files(run.uri(f"{STAGES_FOLDER}/{stage}")):
            yield replace(check, part=f"{stage}: {check.part}")
    records = _checked("records", run_uri, _records)
    if records.files or records.problem:
        yield records
    try:
        pointers = DataPointers.read_if_there(run)
    except UserError:  # reported among the records
        pointers = None
    if pointers:
        yield _checked("prepared data", pointers.prepared_uri, _prepared)
        if pointers.features != "off":
            features = _checked("features", pointers.features_uri, _features)
            gone = not features.files and run.list(CHECKPOINTS)
            yield replace(features, problem="nothing is there, and training read them") if gone else features
    if run.list(CHECKPOINTS):
        yield _checked("checkpoints", run_uri, _checkpoints)
    if run.list(EXPORT):
        yield _checked("export", run_uri, partial(_export, EXPORT))
    for form in get_args(QuantizedFormat):
        folder = quantized_folder(form)
        if run.list(folder) or form in _accepted_forms(run):
            yield _checked(f"{form} export", run_uri, partial(_export, folder))


def _checked(part: str, uri: str, count: Callable[[Storage], int]) -> FileCheck:
    try:
        return FileCheck(part, uri, files=count(open_storage(uri)))
    except (UserError, DamagedError) as error:
        return FileCheck(part, uri, problem=why_unread(error) if isinstance(error, UserError) else str(error))


def _records(run: Storage) -> int:
    names = [info.name for info in run.list() if _is_record(info.name)]
    for name in names:
        try:
            (unseal_lines if name.endswith(".jsonl") else unseal)(run.read(name), required=True)
        except ValueError as error:
            raise damaged_record(run.uri(name), error) from error
    return len(names)


def _is_record(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return folder in ("", "steps", ANSWERS_FOLDER) and file.endswith((".json", ".jsonl")) and file not in UNCHECKED


def _prepared(prepared: Storage) -> int:
    manifest = Manifest.read(prepared)
    if damaged := damaged_files(prepared, manifest.files):
        more = f" and {len(damaged) - 1} more files" if damaged[1:] else ""
        raise UserError(f"damaged or missing: {damaged[0]}{more}")
    return len(manifest.files)


def _features(features: Storage) -> int:
    shards = FeatureShards(features.root_uri)
    if shards.lost:  # the next run encodes their images again
        raise shards.damaged(shards.lost[0], "it is gone, or its size is not the one that was written")
    if features.stat(DESCRIPTION):
        read_record(features, DESCRIPTION)
    for name in shards.names:
        if problem := mismatch(shards.storage.fetch(name), shards.sidecar(name)):
            raise shards.damaged(name, problem)
    return len(shards.names)


def _export(folder: str, run: Storage) -> int:
    return len(require_whole_export(run, folder)["files"])


def _accepted_forms(run: Storage) -> set[str]:
    """Formats of quantized exports that the evaluation has accepted. A damaged one is reported among the records."""
    evaluation = Evaluation.read_if_whole(run)
    return {form for form, scores in evaluation.quantized.items() if scores.accepted} if evaluation else set()


def _checkpoints(run: Storage) -> int:
    return sum(len(run.list(f"{CHECKPOINTS}/{verify(run, name).name}")) for name in committed(run))
