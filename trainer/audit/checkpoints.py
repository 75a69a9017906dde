"""Opens two checkpoints of a run, an early and a late one, as models that compute losses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from vlmpipe.trainer.checkpoint.commit import Listing, candidates, inspect, list_stores
from vlmpipe.trainer.checkpoint.export.hf_export import export_checkpoint
from vlmpipe.trainer.checkpoint.manifest import DamagedError, signing_key
from vlmpipe.trainer.checkpoint.mirror.copies import mirror_of
from vlmpipe.trainer.checkpoint.staging import export_folder
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.dataloading.readers import Readers, open_readers
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.models.loss.chunked_loss import TokenLoss
from vlmpipe.trainer.serving.exported_model import load_export
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage

MIN_GAP = 0.25  # of the later step: a nearer early checkpoint would say the same as the late one
LOSS_CHUNK_TOKENS = 1024  # where the run computes all logits at once: misses are known of chunks only


@dataclass(frozen=True)
class StoredCheckpoint:
    """A whole checkpoint: where it is stored, its name and its step."""

    store: Storage
    name: str
    listing: Listing
    step: int


@dataclass(frozen=True)
class LossModel:
    """The training module of a checkpoint, with what its batches are made of."""

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


@contextmanager
def opened_model(job: JobConfig, stored: StoredCheckpoint) -> Iterator[LossModel]:
    """The model of a checkpoint, exported into a folder of this machine and deleted after it.

    Takes the disk of an export, and the memory of the model. Raises what `export_checkpoint` and `load_export` raise.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint, _ = inspect(stored.store, stored.name, stored.listing, key=signing_key(job.checkpoint))
    with export_folder() as folder:
        local = job.model_copy(update={"run": job.run.model_copy(update={"root_uri": str(folder)})})
        _take_pointers(job, local)
        export_checkpoint(local, stored.store, checkpoint, [])
        family, model = load_export(local, device)
    readers = open_readers(job)
    module = family.training_module(job.model, model, cached=readers.features is not None).eval()
    Recompute(loss_chunk_tokens=job.train.loss_chunk_tokens or LOSS_CHUNK_TOKENS).apply(family, module)
    loss = family.blocks(module).loss
    prepared = open_prepared(job.pointers().prepared_uri)
    yield LossModel(module, loss, Chat.load(prepared, image_form_of(job.model), is_proved=True), readers, device)


def _take_pointers(job: JobConfig, local: JobConfig) -> None:
    """Tell the local run where the data is; addresses of this machine stay as they are."""
    pointers = job.pointers()
    Path(local.run.run_uri).mkdir(parents=True)
    pointers.write(open_storage(local.run.run_uri))
