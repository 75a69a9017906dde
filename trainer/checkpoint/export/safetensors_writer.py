"""Writes weights in the Hugging Face layout with one tensor in memory; safetensors' own writer needs a whole file.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from vlmpipe.trainer.checkpoint.export.published_form import StoredTensors, published_form, stored_tensors
from vlmpipe.trainer.errors import ConfigError, os_errors
from vlmpipe.trainer.models.hf_native.weight_files import DTYPES
from vlmpipe.trainer.sizing.export_size import MAX_SHARD_BYTES
from vlmpipe.trainer.weights_digest import WeightsDigest, raw_bytes


@dataclass(frozen=True)
class Written:
    """Files of a model's weights, and their `vlmpipe.trainer.weights_digest.weights_sha256`."""

    files: list[str]
    weights_sha256: str


def write_weights(
    model: nn.Module,
    read: Callable[[str], Tensor],
    folder: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    finished: Callable[[Path], None] = lambda path: None,
) -> Written:
    """Write the weights of a Hugging Face model in the form of published ones: shards and their index.

    Memory holds one weight, or those that are stored together.

    Args:
        model: gives names, shapes and dtypes; may be on the meta device.
        read: returns a weight by its name in the state dict, in fp32 or the model's dtype, to which it is rounded;
            called in the order of names.
        max_shard_bytes: size of a file; a larger tensor, or more that are one weight here, get a file of their own.
        finished: called with each complete file, which it may delete.
    """
    tensors = dict(sorted(model.state_dict().items()))
    shards = _shards(published_form(model), max_shard_bytes)
    files = _file_names(len(shards))
    digest = WeightsDigest()
    names = iter(tensors)
    held: dict[str, Tensor] = {}
    for file, shard in zip(files, shards, strict=True):
        with os_errors(f"writing {folder / file}"), (folder / file).open("wb") as sink:
            sink.write(_header(stored_tensors(shard)))
            for together in shard:
                while not held.keys() >= set(together.weights):
                    name = next(names)
                    tensor = _as_stored(name, read(name), tensors[name])
                    digest.add(name, tensor)
                    if name not in model.all_tied_weights_keys:  # tied weights are written once
                        held[name] = tensor
                converted = together.convert({name: held.pop(name) for name in together.weights})
                for stored in together.stored:
                    sink.write(raw_bytes(converted.pop(stored)))
        finished(folder / file)
    for name in names:  # tied ones after the last that was written
        digest.add(name, _as_stored(name, read(name), tensors[name]))
    if len(shards) > 1:
        index = folder / SAFE_WEIGHTS_INDEX_NAME
        index.write_text(json.dumps(_index(files, shards), indent=2, sort_keys=True) + "\n", encoding="utf-8")
        finished(index)
        files = [*files, index.name]
    return Written(files, digest.hexdigest())


def _shards(form: list[StoredTensors], max_bytes: int) -> list[list[StoredTensors]]:
    shards: list[list[StoredTensors]] = [[]]
    size = 0
    for together in form:
        nbytes = sum(tensor.nbytes for tensor in together.stored.values())
        if shards[-1] and size + nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(together)
        size += nbytes
    return shards


def _file_names(count: int) -> list[str]:
    stem, ending = SAFE_WEIGHTS_NAME.split(".")
    numbered = [f"{stem}-{number:05d}-of-{count:05d}.{ending}" for number in range(1, count + 1)]
    return numbered if count > 1 else [SAFE_WEIGHTS_NAME]


def _header(tensors: dict[str, Tensor]) -> bytes:
    """Length and JSON of a safetensors header; the data begin at a multiple of 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _index(files: list[str], shards: list[list[StoredTensors]]) -> dict[str, object]:
    tensors = [stored_tensors(shard) for shard in shards]
    parameters = sum(tensor.numel() for shard in tensors for tensor in shard.values())
    size = sum(tensor.nbytes for shard in tensors for tensor in shard.values())
    file_of = {name: file for file, shard in zip(files, tensors, strict=True) for name in shard}
    return {"metadata": {"total_parameters": parameters, "total_size": size}, "weight_map": file_of}


def _as_stored(name: str, tensor: Tensor, expected: Tensor) -> Tensor:
    """The weight in the dtype of `expected`, a tensor on any device."""
    types = {expected.dtype, torch.float32} if expected.is_floating_point() else {expected.dtype}
    if tensor.shape != expected.shape or tensor.dtype not in types:
        raise ConfigError(
            f"weight {name} is {tuple(tensor.shape)} of {tensor.dtype}",
            expected=f"{tuple(expected.shape)} of {expected.dtype}, as in the model section of the run file",
        )
    return tensor.to(expected.dtype)
