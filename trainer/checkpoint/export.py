"""From a checkpoint to a Hugging Face folder that plain `from_pretrained` loads."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from trainer.checkpoint.commit import Checkpoint, fetch_folder, newest_good
from trainer.config import JobConfig
from trainer.data.conversation import load_tokenizer
from trainer.digest import weights_sha256
from trainer.errors import ConfigError
from trainer.models.table import family_of
from trainer.parts import model_sha256
from trainer.storage import open_storage

MARKER = "vlmpipe.json"
MODULE_PREFIX = "model."  # the training module holds the Hugging Face model under this name


def export_run(job: JobConfig) -> dict[str, Any]:
    """Write `<run>/export/` from the newest good checkpoint. Does nothing when it already holds that checkpoint.

    Returns the export's description. Raises ConfigError when the run has no checkpoint or the frozen tower is not the
    one it was trained with.
    """
    store = open_storage(job.run.run_uri)
    checkpoint, passed_over = newest_good(store)
    if checkpoint is None:
        raise ConfigError(
            f"run {job.run.run_id} has no committed checkpoint",
            expected=f"one under {store.uri('checkpoints')}",
            fix="let the train step finish",
        )
    if store.stat(f"export/{MARKER}") is not None:
        described = dict(json.loads(store.read(f"export/{MARKER}")))
        if described["checkpoint"] == checkpoint.name:
            return {**described, "reused": True}
        store.delete(
            f"export/{MARKER}"
        )  # what follows overwrites the other files: until it ends, nothing vouches for them
    tokenizer = load_tokenizer(open_storage(job.pointers().prepared_uri))
    family = family_of(job.model)
    model = family.build(job.model, tokenizer)
    _require_same_model(job, checkpoint, model)
    with tempfile.TemporaryDirectory(prefix="vlmpipe-export-") as scratch:
        folder = fetch_folder(store, checkpoint, Path(scratch))
        load_trained(model, folder, checkpoint.record.checkpoint_format)
        target = Path(scratch, "export")
        family.export(job.model, model, tokenizer, target)
        for file in sorted(path for path in target.rglob("*") if path.is_file()):
            store.upload(file, f"export/{file.relative_to(target).as_posix()}")
    described = {
        "checkpoint": checkpoint.name,
        "step": checkpoint.record.step,
        "weights_sha256": weights_sha256(model),
        "passed_over": passed_over,
        "versions": checkpoint.record.versions,
    }
    store.write(f"export/{MARKER}", json.dumps(described).encode())
    return {**described, "reused": False}


def load_trained(model: nn.Module, folder: Path, checkpoint_format: str) -> None:
    """Put the trained weights of verified checkpoint files into the Hugging Face model, in place. No process group."""
    wanted = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    state = _read_dcp(wanted, folder) if checkpoint_format == "dcp" else _read_deepspeed(folder)
    missing = sorted(set(wanted) - set(state))
    if missing:
        raise ConfigError(f"the checkpoint lacks {len(missing)} trained weights, for example {missing[0]}")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(state[name])


def _read_dcp(wanted: dict[str, nn.Parameter], folder: Path) -> dict[str, Tensor]:
    state = {"model": {MODULE_PREFIX + name: torch.empty_like(tensor) for name, tensor in wanted.items()}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return {name.removeprefix(MODULE_PREFIX): tensor for name, tensor in state["model"].items()}


def _read_deepspeed(folder: Path) -> dict[str, Tensor]:
    """ZeRO-1 and 2 keep the whole module on every rank; rank 0's file holds it."""
    from trainer.strategies.deepspeed import MODULE_FILE

    saved = torch.load(folder / MODULE_FILE, map_location="cpu", weights_only=True)
    return {name.removeprefix(MODULE_PREFIX): tensor for name, tensor in saved["module"].items()}


def _require_same_model(job: JobConfig, checkpoint: Checkpoint, model: nn.Module) -> None:
    record = checkpoint.record
    if record.model_sha256 != model_sha256(job):
        raise ConfigError(f"checkpoint {checkpoint.name} belongs to another model section than this run file's")
    if record.tower_sha256 and record.tower_sha256 != weights_sha256(family_of(job.model).tower(model)):
        raise ConfigError(
            f"the frozen tower of checkpoint {checkpoint.name} had other weights than the one built now",
            fix="pin model.tower.revision and use the versions named in the checkpoint's COMMIT",
        )
