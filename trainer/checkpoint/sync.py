"""The `sync_checkpoint` step: exports the newest good checkpoint, or the best one, and copies it to the mirror."""

from __future__ import annotations

from vlmpipe.trainer.checkpoint.commit import Checkpoint, Listing, inspect, read_commit
from vlmpipe.trainer.checkpoint.export.hf_export import export_checkpoint
from vlmpipe.trainer.checkpoint.manifest import DamagedError, signing_key
from vlmpipe.trainer.checkpoint.mirror.copies import mirror_checkpoint, mirror_of, newest_usable_of
from vlmpipe.trainer.checkpoint.retention import Retention, delete_old_copies
from vlmpipe.trainer.checkpoint.staging import sweep_staging
from vlmpipe.trainer.checkpoint.verified_files import verify
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ConfigError, print_warning
from vlmpipe.trainer.records.metrics import read_metrics
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import CorruptObjectError, Storage

NONE_VALIDATED = "a checkpoint of a validated step"


def sync_run(job: JobConfig) -> dict[str, object]:
    """Export the run's newest checkpoint whose trained weights verify, and copy it to the mirror, if any.

    With `checkpoint.export: best` that of the best validated step, or the newest one where the best one is damaged or
    was not saved; another one than asked for is a warning. Of the checkpoint only the trained weights are read. May be
    repeated if killed. Returns the export's description and, as `mirror`, the URI of the copy or "". Raises ConfigError
    when the run has no checkpoint, UserError (74) when none can be exported.
    """
    sweep_staging()
    store, mirror, key = open_storage(job.run.run_uri), mirror_of(job), signing_key(job.checkpoint)
    passed_over: list[str] = []
    asked = ""

    def export(source: Storage, name: str, listing: Listing) -> tuple[Storage, Checkpoint, dict[str, object]]:
        checkpoint, _ = inspect(source, name, listing, key=key)
        return source, checkpoint, export_checkpoint(job, source, checkpoint, passed_over)

    def first(newest_store: Storage, newest: str) -> str:
        nonlocal asked
        asked = _best(job, newest_store, newest, key) if job.checkpoint.export == "best" else newest
        return asked

    usable = newest_usable_of([store, mirror] if mirror else [store], export, passed_over, first=first)
    if usable is None:
        raise ConfigError(
            f"run {job.run.run_id} has no committed checkpoint",
            expected=f"one under {store.uri('checkpoints')}",
            fix="let the train step finish",
        )
    source, checkpoint, described = usable
    if checkpoint.name != asked:
        text = f"checkpoint {checkpoint.name} is exported in place of {asked}: {'; '.join(passed_over)}"
        print_warning(text, step="sync-checkpoint")
    return {**described, "mirror": _mirrored(job, source, mirror, checkpoint, key) if mirror else ""}


def _best(job: JobConfig, store: Storage, newest: str, key: bytes) -> str:
    """Name of the best validated checkpoint, by the COMMIT of the newest one and its own validation, which may have
    come after it.
    """
    try:
        record = read_commit(store, newest, key=key)
    except DamagedError:
        return newest
    if not (validations := record.validations):
        return NONE_VALIDATED
    values = (
        line.number(validations.metric)
        for line in read_metrics(open_storage(job.run.run_uri))
        if line.step == record.step and line.number("validation_label_tokens") == validations.label_tokens
    )
    for value in values:
        if value is not None:
            validations = validations.counted(record.step, value)
    return validations.committed(newest, record.step).saved or NONE_VALIDATED


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
