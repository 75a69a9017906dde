"""The `sync_checkpoint` step of a training program: exports its result as that of our own trainer."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import asdict
from typing import Any

from trainer.checkpoint.commit import verify
from trainer.config.job import JobConfig
from trainer.errors import ConfigError, DataError
from trainer.external.states import newest_result
from trainer.storage import open_storage
from trainer.storage.export_manifest import FOLDER, NAME, require_whole_export, write_description
from trainer.storage.file_sums import FileSum


def sync_result(job: JobConfig) -> dict[str, Any]:
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
    run.delete(NAME)  # no export exists until all files are there
    run.delete_folder(FOLDER)
    files: dict[str, dict[str, int]] = {}
    digest = hashlib.sha256()
    folder = f"checkpoints/{result.name}"
    for info in sorted(source.list(folder), key=lambda info: info.name):
        name = info.name.removeprefix(f"{folder}/")
        if name in ("COMMIT", *result.record.manifests):
            continue
        path = source.fetch(info.name)
        sums = FileSum.of(path)
        run.upload(path, f"{FOLDER}/{name}", crc32c=sums.crc32c)
        files[name] = asdict(sums)
        digest.update(f"{name} {sums.bytes} {sums.crc32c}\n".encode())
    verify(source, result.name)  # what was copied is what was committed
    described = {
        "checkpoint": result.name,
        "step": result.record.step,
        "averaged": False,
        "is_adapter": trainer.result == "hf-adapter",
        "ema_decay": 0.0,
        "weights_sha256": digest.hexdigest(),
        "passed_over": passed_over,
        "trainer": trainer.name,
        "versions": result.record.versions,
        "files": files,
    }
    write_description(run, described)
    return {**described, "reused": False, "mirror": ""}
