"""Opens two checkpoints of a run, an early and a late one, as models that compute losses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from vlmpipe.trainer.checkpoint.commit import Listing, candidates, inspect, list_stores
from vlmpipe.trainer.checkpoint.export.hf_export import export_checkpoint
from vlmpipe.trainer.checkpoint.manifest import DamagedError, signing_key
from vlmpipe.trainer.checkpoint.mirror.copies import mirror_of
from vlmpipe.trainer.checkpoint.staging import export_folder
from vlmpipe.trainer.config.job import AUDIT_CHUNK_TOKENS, JobConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.dataloading.readers import Readers, open_readers
from vlmpipe.trainer.distributed.agreement import meet, on_first, together
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.models.loss.chunked_loss import TokenLoss
from vlmpipe.trainer.serving.exported_model import load_export
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage

MIN_GAP = 0.25  # of the later step: a nearer early checkpoint would say the same as the late one


@dataclass(frozen=True)
class StoredCheckpoint:
    """A whole checkpoint: where it is stored, its name and its step."""

    store: Storage
    name: str
    listing: Listing
    step: int


@dataclass(frozen=True)
class LossModel:
    """The training module of a checkpoint, with the sources of its batches."""

    module: nn.Module
    loss: TokenLoss
    chat: Chat
    readers: Readers
    device: torch.device


def checkpoints_of(job: JobConfig) -> tuple[list[StoredCheckpoint], list[str]]:
    """The run's whole checkpoints, one for each step, by step; and what is wrong with others."""
    mirror, key = mirror_of(job), signing_key(job.checkpoint)
    stores = [open_storage(job.run.run_uri), *([mirror] if mirror else [])]
    listings, errors = list_stores(stores)
    faults = [str(error.found) for error in errors.values()]
    checkpoints: dict[int, StoredCheckpoint] = {}
    for number, name in candidates(listings):
        try:
            checkpoint, _ = inspect(stores[number], name, listings[number], key=key)
        except DamagedError as error:
            faults.append(str(error))
            continue
        step = checkpoint.record.step
        checkpoints.setdefault(step, StoredCheckpoint(stores[number], name, listings[number], step))
    return [checkpoints[step] for step in sorted(checkpoints)], faults


def early_and_late(checkpoints: list[StoredCheckpoint]) -> list[StoredCheckpoint]:
    """The first and the last checkpoint; the last alone where the first is not much earlier."""
    if len(checkpoints) > 1 and checkpoints[0].step <= (1 - MIN_GAP) * checkpoints[-1].step:
        return [checkpoints[0], checkpoints[-1]]
    return checkpoints[-1:]


def compared_names(job: JobConfig) -> tuple[str, ...]:
    """Names of the checkpoints whose losses an audit of the run compares; empty for a run without losses of answers."""
    if job.train.in_pairs:
        return ()
    return tuple(stored.name for stored in early_and_late(checkpoints_of(job)[0]))


@contextmanager
def opened_model(job: JobConfig, stored: StoredCheckpoint, worker: ProcessContext) -> Iterator[LossModel]:
    """The model of a checkpoint, exported into a folder of this machine by the first rank and deleted after it.

    Takes the disk of an export, and the memory of the model on each rank. Collective, of ranks of one machine. Raises
    what `export_checkpoint` and `load_export` raise, on all ranks.
    """
    with contextlib.ExitStack() as scratch:

        def export() -> str:
            folder = scratch.enter_context(export_folder())
            checkpoint, _ = inspect(stored.store, stored.name, stored.listing, key=signing_key(job.checkpoint))
            local = _local(job, str(folder))
            Path(local.run.run_uri).mkdir(parents=True)
            job.pointers().write(open_storage(local.run.run_uri))
            export_checkpoint(local, stored.store, checkpoint, [])
            return str(folder)

        local = _local(job, export() if worker.world_size == 1 else on_first(worker, export))
        opened = partial(load_export, local, worker.device)
        family, model = opened() if worker.world_size == 1 else together(worker, "loading a checkpoint", opened)
        meet(worker)  # the folder is deleted once all ranks have read it
    readers = open_readers(job)
    module = family.training_module(job.model, model, cached=readers.features is not None).eval()
    # Misses are known of chunks only.
    Recompute(loss_chunk_tokens=job.train.loss_chunk_tokens or AUDIT_CHUNK_TOKENS).apply(family, module)
    loss = family.blocks(module).loss
    prepared = open_prepared(job.pointers().prepared_uri)
    chat = Chat.load(prepared, image_form_of(job.model), is_proved=True)
    yield LossModel(module, loss, chat, readers, worker.device)


def alone() -> ProcessContext:
    """The single rank of a process without a group of processes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return ProcessContext(0, 1, 0, 1, device)


def _local(job: JobConfig, folder: str) -> JobConfig:
    """The job with a run's folder on this machine; addresses of its data stay as they are."""
    return job.model_copy(update={"run": job.run.model_copy(update={"root_uri": folder})})
