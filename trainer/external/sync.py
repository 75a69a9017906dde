"""The `sync_checkpoint` step of a training program: exports its result as that of our own trainer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

from vlmpipe.trainer.checkpoint.staging import export_folder
from vlmpipe.trainer.checkpoint.verified_files import fetch_folder
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ConfigError, DataError
from vlmpipe.trainer.external.base_model import base_model
from vlmpipe.trainer.external.checkpoints.states import MODEL_SUFFIXES, newest_result
from vlmpipe.trainer.external.result import ADAPTER_CONFIG
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import FOLDER, NAME, require_whole_export, write_description
from vlmpipe.trainer.storage.file_sums import FileSum, files_below


def sync_result(job: JobConfig) -> dict[str, object]:
    """Copy the newest result that verifies to `<run>/export`, unless it is there. May be repeated if killed.

    Returns the export's description, and `mirror`, which is "". Raises ConfigError when there is no result, UserError
    (74) when none verifies.
    """
    trainer, run = job.train.trainer, open_storage(job.run.run_uri)
    assert trainer
    source, result, passed_over = newest_result(job)
    if result is None:
        raise ConfigError(
            f"run {job.run.run_id} has no finished result of train.trainer {trainer.name}",
            expected=f"one under {source.root_uri}",
            fix="let the train step finish",
        )
    with contextlib.suppress(DataError):  # there is no export, or a damaged one
        described = require_whole_export(run)
        if described["checkpoint"] == result.name:
            return {**described, "reused": True, "mirror": ""}
    with export_folder() as scratch:
        folder = fetch_folder(source, result, scratch)
        for manifest in result.record.manifests:
            (folder / manifest).unlink(missing_ok=True)
        if trainer.result == "hf-adapter":
            folder = merged_adapter(job, folder, scratch)
        run.delete(NAME)  # no export exists until all files are there
        run.delete_folder(FOLDER)
        # The links of a fetched folder lead to the store's own files.
        sums = {name: FileSum.of(path) for name, path in files_below(folder).items()}
        for name, entry in sums.items():
            run.upload((folder / name).resolve(), f"{FOLDER}/{name}", crc32c=entry.crc32c)
    files = {name: asdict(entry) for name, entry in sums.items()}
    described = {
        "checkpoint": result.name,
        "step": result.record.step,
        "averaged": False,
        "is_adapter": False,
        "ema_decay": 0.0,
        "weights_sha256": hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest(),
        "passed_over": passed_over,
        "trainer": trainer.name,
        "versions": result.record.versions,
        "files": files,
    }
    write_description(run, described)
    return {**described, "reused": False, "mirror": ""}


def merged_adapter(job: JobConfig, adapter: Path, scratch: Path) -> Path:
    """A folder with the whole model: the adapter merged into the base that it was trained on."""
    from vlmpipe.trainer.models.registry import family_of

    (scratch / "base").mkdir()
    base = base_model(job, scratch / "base")
    copied, merged = scratch / "adapter", scratch / "merged"
    shutil.copytree(adapter, copied)  # follows links
    settings = json.loads((copied / ADAPTER_CONFIG).read_bytes())
    # It names the folder that the base had on the machine of the training job.
    (copied / ADAPTER_CONFIG).write_text(json.dumps({**settings, "base_model_name_or_path": base}), encoding="utf-8")
    for path in Path(base).glob("*"):  # tokenizer, processor and generation settings; none of a hub id
        if path.suffix in MODEL_SUFFIXES and path.suffix != ".safetensors" and not (copied / path.name).exists():
            shutil.copyfile(path, copied / path.name)
    model = family_of(job.model).load(copied)
    model.save_pretrained(merged)
    for path in copied.iterdir():
        if not path.name.startswith("adapter_") and not (merged / path.name).exists():
            shutil.copyfile(path, merged / path.name)
    return merged
