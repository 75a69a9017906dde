"""The `sync_checkpoint` step: exports the newest good checkpoint and copies it to the mirror."""

from __future__ import annotations

from vlmpipe.trainer.checkpoint.commit import Checkpoint, Listing, inspect
from vlmpipe.trainer.checkpoint.export.hf_export import export_checkpoint
from vlmpipe.trainer.checkpoint.manifest import DamagedError, signing_key
from vlmpipe.trainer.checkpoint.mirror.copies import mirror_checkpoint, mirror_of, newest_usable_of
from vlmpipe.trainer.checkpoint.retention import Retention, delete_old_copies
from vlmpipe.trainer.checkpoint.staging import sweep_staging
from vlmpipe.trainer.checkpoint.verified_files import verify
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ConfigError, print_warning
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import CorruptObjectError, Storage


def sync_run(job: JobConfig) -> dict[str, object]:
    """Export the run's newest checkpoint whose trained weights verify, and copy it to the mirror, if any.

    Of the checkpoint only the trained weights are read. May be repeated if killed. Returns the export's description
    and, as `mirror`, the URI of the copy or "". Raises ConfigError when the run has no checkpoint, UserError (74) when
    none can be exported.
    """
    sweep_staging()
    store, mirror, key = open_storage(job.run.run_uri), mirror_of(job), signing_key(job.checkpoint)
    passed_over: list[str] = []

    def export(source: Storage, name: str, listing: Listing) -> tuple[Storage, Checkpoint, dict[str, object]]:
        checkpoint, _ = inspect(source, name, listing, key=key)
        return source, checkpoint, export_checkpoint(job, source, checkpoint, passed_over)

    found = newest_usable_of([store, mirror] if mirror else [store], export, passed_over)
    if found is None:
        raise ConfigError(
            f"run {job.run.run_id} has no committed checkpoint",
            expected=f"one under {store.uri('checkpoints')}",
            fix="let the train step finish",
        )
    source, checkpoint, described = found
    return {**described, "mirror": _mirrored(job, source, mirror, checkpoint, key) if mirror else ""}


def _mirrored(job: JobConfig, source: Storage, mirror: Storage, checkpoint: Checkpoint, key: bytes) -> str:
    """URI of the copy; "" where it cannot be made, because something else than the exported weights is damaged."""
    try:
        uri = mirror_checkpoint(source, mirror, checkpoint)
    except CorruptObjectError:
        try:
            verify(source, checkpoint.name, key=key)
        except DamagedError as damaged:
            print_warning(f"the mirror has no copy of the exported checkpoint: {damaged}", step="sync-checkpoint")
            return ""
        raise
    delete_old_copies(mirror, Retention.of(job), newest=checkpoint.name, key=key)
    return uri
