"""The model that training starts from, on this rank's device."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from vlmpipe.trainer.checkpoint.export.model_folder import write_start
from vlmpipe.trainer.checkpoint.staging import export_folder
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.distributed.agreement import gather, meet, together
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.models.published import model_file
from vlmpipe.trainer.serving.exported_model import load_folder
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import MARKER
from vlmpipe.trainer.storage.model_folders import bucket_address, local_folder, revision_of
from vlmpipe.trainer.storage.records import read_record

SNAPSHOTS = "snapshots"  # of a hub's cache: a folder for each commit
FOLDER = "start"


def load_start(
    job: JobConfig, tokenizer: PreTrainedTokenizerFast, device: torch.device, worker: ProcessContext
) -> nn.Module:
    """The start weights as `load_export` gives an export, so that equal weights give equal answers. Collective.

    The first rank of a node writes them once to its disk, in the type in which the export is rounded. Raises UserError
    and ConfigError on all ranks where they cannot be read.
    """
    halves = "bf16" in (job.export_dtype, job.train.precision)
    with contextlib.ExitStack() as scratch:

        def place() -> str:
            return str(scratch.enter_context(export_folder()) / FOLDER) if worker.is_node_leader else ""

        folders = gather((worker.node, together(worker, "making a folder for the start weights", place)), worker)
        folder = Path(next(path for node, path in folders if node == worker.node and path))

        def write() -> None:
            if worker.is_node_leader:
                write_start(job, tokenizer, folder, torch.bfloat16 if halves else torch.float32)

        together(worker, "writing the start weights", write)
        model = together(worker, "loading the start weights", lambda: load_folder(job, folder, device))
        meet(worker)  # the folder is deleted once all ranks of the node have read it
    return model


def weights_identity(job: JobConfig) -> dict[str, str]:
    """Return what changes with the start weights, by the field that names them; reads no weights."""
    parts = {name: part for name, part in job.model.sources.items() if part and part.weights}
    if job.model.lora and job.model.lora.pretrained:
        parts["lora.pretrained"] = WeightsConfig(weights=job.model.lora.pretrained, revision="", config={})
    return {name: _identity(part) for name, part in parts.items()}


def _identity(part: WeightsConfig) -> str:
    """A bucket's revision, the digest of an export's weights, a hub's commit, or its files' sizes and times."""
    if address := bucket_address(part.weights):
        return f"revision {revision_of(address)}"
    folder = local_folder(part.weights, part.revision, weights=False)
    if folder is None:
        file = model_file(part, "config.json", weights=False) or model_file(part, "adapter_config.json", weights=False)
        commit = next((path.name for path in file.parents if path.parent.name == SNAPSHOTS), "") if file else ""
        return f"commit {commit or part.revision}"
    if (folder / MARKER).is_file():
        return f"weights {read_record(open_storage(str(folder)), MARKER).get('weights_sha256')}"
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
    state = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"files {hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]}"
