"""Exports a checkpoint to a Hugging Face folder for `from_pretrained`, one tensor at a time.

`vlmpipe.trainer.sizing.export_size` says what that reads and holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from vlmpipe.trainer.checkpoint.commit import Checkpoint
from vlmpipe.trainer.checkpoint.export.model_folder import write_model
from vlmpipe.trainer.checkpoint.export.opened_export import require_opens
from vlmpipe.trainer.checkpoint.export.weight_reader import WeightReader, holds_average, open_weights
from vlmpipe.trainer.checkpoint.staging import export_folder
from vlmpipe.trainer.checkpoint.verified_files import CheckpointFiles
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.added_tokens import trained_tokens
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.tokenize import load_tokenizer
from vlmpipe.trainer.errors import ConfigError, DataError, os_errors
from vlmpipe.trainer.hooks.features import features_of
from vlmpipe.trainer.models.base import Weights
from vlmpipe.trainer.models.hf_native.peft_folder import stored_names, write_adapter
from vlmpipe.trainer.models.hf_native.weight_files import read_in_passing
from vlmpipe.trainer.models.layers.freeze import frozen_weights, is_adapter, plain_name, tied_names
from vlmpipe.trainer.models.layers.lora import adapters_of, train_rows_only, without_adapters
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.export_size import MAX_SHARD_BYTES
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage, crc32c_of_file
from vlmpipe.trainer.storage.export_manifest import FOLDER, NAME, require_whole_export, write_description
from vlmpipe.trainer.weights_digest import combined_sha256, model_sha256, tensor_sha256, tensors_sha256, weights_sha256

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPENED = "opened"  # of an export's settings, as they were uploaded


@read_in_passing()
def export_checkpoint(
    job: JobConfig,
    source: Storage,
    checkpoint: Checkpoint,
    passed_over: list[str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> dict[str, object]:
    """Write `<run>/export/` from a checkpoint in `source`, unless that export exists undamaged.

    A whole model, or an adapter in PEFT's format (`model.lora.export`). Exports the average of the weights if
    `train.ema_decay` is set and the checkpoint has one. Frozen weights are read where they lie, twice: the first time
    their digest is compared with the checkpoint's. Memory holds one tensor, before that the frozen tower, or the
    adapter; the local disk one file. Returns the export's description, which is written last and makes the export
    exist, after the export was opened as another program would open it. Raises ConfigError when the checkpoint belongs
    to another model, before touching an earlier export, DamagedError when a weight is not what was saved, and UserError
    (80) when the export does not open: these two may leave no export.
    """
    store = open_storage(job.run.run_uri)
    with contextlib.suppress(DataError):  # there is none, or a damaged one
        described = require_whole_export(store)
        if described.items() >= {"checkpoint": checkpoint.name, **_form_of(job)}.items():
            return {**described, "reused": True}
    _require_same_model(job, checkpoint)
    family = family_of(job.model)
    tokenizer = load_tokenizer(open_prepared(job.pointers().prepared_uri))
    adapted = family.blueprint(job.model, tokenizer)
    if tokens := trained_tokens(job.model, tokenizer):
        train_rows_only(adapted, tokens)
    blueprint = family.blueprint(without_adapters(job.model), tokenizer) if job.model.lora else adapted
    blueprint = blueprint.to(DTYPES[job.export_dtype])
    initial = family.initial_weights(job.model, tokenizer)
    _require_same_base(checkpoint, initial, sorted(frozen_weights(adapted)))
    for feature in features_of(job):
        initial = feature.as_trained(initial, adapted)
    with export_folder() as scratch:
        files = CheckpointFiles.of(source, checkpoint)
        checkpoint_format = checkpoint.record.checkpoint_format
        # There is none if ema_decay was set after the run's last step.
        averaged = bool(job.train.ema_decay) and holds_average(files, checkpoint_format)
        trained = open_weights(files, checkpoint_format, averaged=averaged)
        weights = Merged(adapted, trained, initial)

        def write_adapter_to(target: Path) -> str:
            write_adapter(adapted, job.model, weights.read_trained, target)
            return tensors_sha256((name, weights.read_trained(name)) for name in sorted(stored_names(adapted)))

        upload = _Upload(job, store, scratch / FOLDER, max_shard_bytes)
        write = write_adapter_to if job.model.exports_adapter else None
        weights_digest = upload.send_model(blueprint, tokenizer, weights.read, write_adapter=write)
        upload.open(adapted if write else blueprint, scratch / OPENED, is_adapter=bool(write))
    described = {
        "checkpoint": checkpoint.name,
        "step": checkpoint.record.step,
        "averaged": averaged,
        **_form_of(job),
        "weights_sha256": weights_digest,
        "passed_over": passed_over,
        "versions": checkpoint.record.versions,
        "files": upload.files,
    }
    write_description(store, described)
    return {**described, "reused": False}


def export_initial(job: JobConfig) -> dict[str, object]:
    """Write `<run>/export/` from the weights that training would start with, for a run that trains nothing.

    Returns the export's description, whose checkpoint is empty.
    """
    store, family = open_storage(job.run.run_uri), family_of(job.model)
    tokenizer = load_tokenizer(open_prepared(job.pointers().prepared_uri))
    blueprint = family.blueprint(job.model, tokenizer).to(DTYPES[job.export_dtype])
    initial = family.initial_weights(job.model, tokenizer)
    tied = dict(getattr(blueprint, "all_tied_weights_keys", {}))
    with export_folder() as scratch:
        upload = _Upload(job, store, scratch / FOLDER, MAX_SHARD_BYTES)
        digest = upload.send_model(blueprint, tokenizer, lambda name: initial.read(tied.get(name, name)))
        upload.open(blueprint, scratch / OPENED, is_adapter=False)
    described = {
        "checkpoint": "",
        "step": 0,
        "averaged": False,
        **_form_of(job),
        **{"is_adapter": False, "ema_decay": 0.0},
        "weights_sha256": digest,
        "passed_over": [],
        "versions": {},
        "files": upload.files,
    }
    write_description(store, described)
    return described


def _form_of(job: JobConfig) -> dict[str, object]:
    """Settings of the run file that decide the form of its export."""
    return {
        "is_adapter": job.model.exports_adapter,
        "ema_decay": job.train.ema_decay,
        "dtype": job.export_dtype,
    }


class _Upload:
    """Sends an export's files to the run's folder, each as soon as it is written to `target`, a new local folder."""

    def __init__(self, job: JobConfig, store: Storage, target: Path, max_shard_bytes: int) -> None:
        self._job, self._store, self._target, self._max_shard_bytes = job, store, target, max_shard_bytes
        self.files: dict[str, dict[str, int]] = {}
        with os_errors(f"writing {target}"):
            target.mkdir()

    def send_model(
        self,
        blueprint: nn.Module,
        tokenizer: PreTrainedTokenizerFast,
        read: Callable[[str], Tensor],
        *,
        write_adapter: Callable[[Path], str] | None = None,
    ) -> str:
        """Send the model's weights and settings, or an adapter in their place. Returns the weights' digest.

        Args:
            read: a weight of the blueprint by its name.
            write_adapter: writes the adapter to a folder, and returns its digest.
        """
        target = self._target
        self._store.delete(NAME)  # no export exists until all files are overwritten
        digest = write_model(
            self._job,
            blueprint,
            tokenizer,
            read,
            target,
            max_shard_bytes=self._max_shard_bytes,
            finished=self._send,
            write_adapter=write_adapter,
        )
        for file in sorted(path for path in target.rglob("*") if path.is_file()):
            self._send(file)
        for info in self._store.list(FOLDER):
            if info.name.removeprefix(f"{FOLDER}/") not in self.files:
                self._store.delete(info.name)  # of an earlier export: from_pretrained might load it
        return digest

    def open(self, model: nn.Module, scratch: Path, *, is_adapter: bool) -> None:
        """Raise UserError (exit 80) where another program would not open the uploaded files, which are then no export.

        model: the blueprint that was sent, or that with the adapters that were.
        """
        scratch.mkdir()
        sizes = {name: sums["bytes"] for name, sums in self.files.items()}
        require_opens(self._store, sizes, model, scratch, is_adapter=is_adapter)

    def _send(self, file: Path) -> None:
        name = file.relative_to(self._target).as_posix()
        with os_errors(f"reading {file}"):
            self.files[name] = {"bytes": file.stat().st_size, "crc32c": crc32c_of_file(file)}
            self._store.upload(file, f"{FOLDER}/{name}", crc32c=self.files[name]["crc32c"])
            file.unlink()


class Merged:
    """Trained weights from the checkpoint, frozen ones from their source with adapters merged in, by their names in the
    model without adapters.

    A `vlmpipe.trainer.models.base.Weights`. Raises ConfigError when the checkpoint lacks a trained weight, or has
    adapters that the model lacks.
    """

    def __init__(self, model: nn.Module, trained: WeightReader, initial: Weights) -> None:
        """model: that was trained, with its adapters; its values are not looked at."""
        self._trained, self._initial, self._adapters = trained, initial, adapters_of(model)
        self._tied_to = tied_names(model)
        named = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        in_adapters = {name for name in named if is_adapter(name)}
        # Averages hold a tied head under one name.
        self._trainable = {plain_name(name) for name in named if name not in in_adapters} - self._tied_to.keys()
        if missing := sorted((self._trainable | in_adapters) - trained.names):
            raise ConfigError(f"the checkpoint lacks {len(missing)} trained weights, for example {missing[0]}")
        if unknown := sorted(name for name in trained.names if is_adapter(name) and name not in in_adapters):
            raise ConfigError(
                f"the checkpoint holds {len(unknown)} matrices of adapters that the model lacks, for example "
                f"{unknown[0]}",
                expected="adapters of the layers that model.lora names; an earlier vlmpipe may have had another "
                "default of model.lora.targets",
                fix="export it with the vlmpipe that trained it",
            )

    def read(self, name: str) -> Tensor:
        name = self._tied_to.get(name, name)
        if name in self._trainable:
            return self._trained.read(name)
        weight, adapter = self._initial.read(name), self._adapters.get(name)
        return adapter.merged(weight, self._trained.read) if adapter else weight

    def read_trained(self, name: str) -> Tensor:
        """A trained weight or a matrix of an adapter, by its name in the trained model."""
        return self._trained.read(self._tied_to.get(name, name))


def _require_same_model(job: JobConfig, checkpoint: Checkpoint) -> None:
    record = checkpoint.record
    if record.model_sha256 != model_sha256(job):
        raise ConfigError(f"checkpoint {checkpoint.name} belongs to another model section than this run file's")
    if record.tower_sha256 and record.tower_sha256 != weights_sha256(family_of(job.model).build_tower(job.model)):
        raise ConfigError(
            f"the frozen tower of checkpoint {checkpoint.name} had other weights than the one built now",
            fix="pin model.tower.revision and use the versions named in the checkpoint's COMMIT",
        )


def _require_same_base(checkpoint: Checkpoint, initial: Weights, frozen: list[str]) -> None:
    """`frozen` names the frozen weights outside a frozen tower."""
    expected = checkpoint.record.frozen_sha256
    if expected and expected != combined_sha256({name: tensor_sha256(initial.read(name)) for name in frozen}):
        raise ConfigError(
            f"the frozen weights under checkpoint {checkpoint.name} (beside a frozen tower's) were others than those "
            "built now",
            fix="pin model.language_model.revision and use the versions named in the checkpoint's COMMIT",
        )
