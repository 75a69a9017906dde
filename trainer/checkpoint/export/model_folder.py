"""Folders of whole models, as `from_pretrained` reads them: of trained weights and of start weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from vlmpipe.trainer.checkpoint.export.safetensors_writer import write_weights
from vlmpipe.trainer.checkpoint.export.settings_files import save_settings
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import os_errors
from vlmpipe.trainer.hooks.features import features_of
from vlmpipe.trainer.models.base import Weights
from vlmpipe.trainer.models.hf_native.weight_files import read_in_passing
from vlmpipe.trainer.models.layers.freeze import is_adapter, plain_name
from vlmpipe.trainer.models.layers.lora import adapters_of, without_adapters
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.export_size import MAX_SHARD_BYTES


def write_model(
    job: JobConfig,
    blueprint: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    read: Callable[[str], Tensor],
    target: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    finished: Callable[[Path], None] = lambda path: None,
    write_adapter: Callable[[Path], str] | None = None,
) -> str:
    """Write the model's weights and settings, or an adapter in their place, to a folder. Returns the weights' digest.

    Args:
        read: a weight of the blueprint by its name.
        finished: called with each complete file of weights, which it may delete.
        write_adapter: writes the adapter to a folder, and returns its digest.
    """
    # Beside the base, which plain transformers loads.
    parts = [(feature, blueprint._modules.pop(feature.part, None)) for feature in features_of(job) if feature.part]
    if write_adapter:
        digest = write_adapter(target)
    else:
        written = write_weights(blueprint, read, target, max_shard_bytes=max_shard_bytes, finished=finished)
        digest = written.weights_sha256
    with os_errors(f"writing {target}"):
        save_settings(family_of(job.model), job.model, blueprint, tokenizer, target)
        for feature, part in parts:
            if part is not None:
                feature.save_part(part, read, target)
    return digest


@read_in_passing()
def write_start(job: JobConfig, tokenizer: PreTrainedTokenizerFast, target: Path, dtype: torch.dtype) -> None:
    """Write the model that training starts from, as a whole model in `dtype`, also where adapters are trained.

    Memory holds one weight; published weights are read where they lie.
    """
    family, plain = family_of(job.model), without_adapters(job.model)
    blueprint = family.blueprint(plain, tokenizer).to(dtype)
    weights = family.initial_weights(job.model, tokenizer)
    if job.model.lora and job.model.lora.pretrained:
        weights = WithFirstAdapter(weights, family.blueprint(job.model, tokenizer, buffers=True))
    tied = dict(getattr(blueprint, "all_tied_weights_keys", {}))
    with os_errors(f"writing {target}"):
        target.mkdir()
    write_model(job, blueprint, tokenizer, lambda name: weights.read(tied.get(name, name)), target)


class WithFirstAdapter:
    """A base's weights with the adapter that training starts from: merged in, and modules that it holds whole."""

    def __init__(self, base: Weights, adapted: nn.Module) -> None:
        """adapted: with the adapter's values, other parameters without any."""
        self._base, self._adapters = base, adapters_of(adapted)
        self._values = {name: weight.detach() for name, weight in adapted.named_parameters() if not weight.is_meta}
        self._whole = {plain_name(name): weight for name, weight in self._values.items() if not is_adapter(name)}

    def read(self, name: str) -> Tensor:
        if name in self._whole:
            return self._whole[name]
        weight, adapter = self._base.read(name), self._adapters.get(name)
        return adapter.merged(weight, self._values.__getitem__) if adapter else weight
