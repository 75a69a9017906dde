"""The `sync_checkpoint` step: mirrors and exports the newest good checkpoint."""

from __future__ import annotations

from typing import Any

from vlmpipe.trainer.checkpoint.hf_export import export_checkpoint
from vlmpipe.trainer.checkpoint.manifest import signing_key
from vlmpipe.trainer.checkpoint.mirror.copies import mirror_checkpoint, mirror_of, newest_good_of
from vlmpipe.trainer.checkpoint.retention import Retention, delete_old_copies
from vlmpipe.trainer.checkpoint.staging import sweep_staging
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage import open_storage


def sync_run(job: JobConfig) -> dict[str, Any]:
    """Verify the run's newest good checkpoint, copy it to the mirror, if any, and export it. May be repeated if killed.

    Returns the export's description and, as `mirror`, the URI of the copy or "". Raises ConfigError when the run has no
    checkpoint, UserError (74) when none verifies.
    """
    sweep_staging()
    store, mirror, key = open_storage(job.run.run_uri), mirror_of(job), signing_key(job.checkpoint)
    stores = [store, mirror] if mirror else [store]
    source, checkpoint, passed_over = newest_good_of(stores, key=key)
    if checkpoint is None:
        raise ConfigError(
            f"run {job.run.run_id} has no committed checkpoint",
            expected=f"one under {store.uri('checkpoints')}",
            fix="let the train step finish",
        )
    mirrored = ""
    if mirror:
        mirrored = mirror_checkpoint(source, mirror, checkpoint)
        delete_old_copies(mirror, Retention.of(job), newest=checkpoint.name, key=key)
    return {**export_checkpoint(job, source, checkpoint, passed_over), "mirror": mirrored}
