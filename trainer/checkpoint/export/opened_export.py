"""Opens an export as another program would, before it is called done: from the bytes that were uploaded.

Of files with weights only the headers are read. The model is loaded once on the meta device, by transformers or PEFT,
from their names and shapes: it holds no weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig
from transformers.initialization import no_init_weights
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from vlmpipe.trainer.checkpoint.export.published_form import published_form, stored_tensors
from vlmpipe.trainer.checkpoint.export.safetensors_writer import DTYPES
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.models.hf.processor import kind_of
from vlmpipe.trainer.models.hf_native.peft_folder import (
    PREFIX,
    ROWS,
    WEIGHTS,
    heads_of_rows,
    older_keys,
    stored_names,
)
from vlmpipe.trainer.models.layers.deferred_weights import parameters_on_meta
from vlmpipe.trainer.models.layers.lora import ADAPTER, rows_in
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.export_manifest import FOLDER

HEADER_LENGTH_BYTES = 8
TYPES = {name: dtype for dtype, name in DTYPES.items()}
PARTS = (".lora_", ".modules_to_save.", f".{ROWS}")  # in PEFT's names of what an adapter holds


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def require_opens(run: Storage, sizes: Mapping[str, int], model: nn.Module, scratch: Path, *, is_adapter: bool) -> None:
    """Raise UserError (exit 80) unless the export has the published tensors, whole files, and loads.

    Args:
        run: the folder of the run, which holds the export.
        sizes: bytes of each file that was written.
        model: on the meta device: what was exported, or the model with its adapters.
        scratch: an empty folder, for settings files.
    """
    stored: dict[str, Stored] = {}
    for file in sorted(sizes):
        if not file.endswith(".safetensors"):
            _copy(run, file, scratch)
        elif file == WEIGHTS or file.startswith("model"):
            stored |= _tensors(run, file, sizes[file])
        else:
            _tensors(run, file, sizes[file])
    tensors = _adapter_tensors(model) if is_adapter else stored_tensors(published_form(model))
    _require_tensors(run, stored, tensors)
    _require_index(run, scratch / SAFE_WEIGHTS_INDEX_NAME, stored)
    try:
        AutoTokenizer.from_pretrained(scratch, trust_remote_code=False)
        GenerationConfig.from_pretrained(scratch)
        missing, unexpected = (_load_adapter if is_adapter else _load_model)(scratch, model, tensors)
    except (ValueError, KeyError, TypeError, OSError, RuntimeError, AttributeError) as error:
        raise _wrong(run, f"does not open: {' '.join(str(error).split())[:400]}") from error
    if missing or unexpected:
        names = "; ".join(
            f"{len(some)} weights {how}, for example {min(some)}"
            for how, some in (("are not found", missing), ("are not known", unexpected))
            if some
        )
        raise _wrong(run, f"does not open whole: {names}")


def _copy(run: Storage, file: str, folder: Path) -> None:
    content = run.read(f"{FOLDER}/{file}")
    if file.endswith(".json"):
        try:
            json.loads(content)
        except ValueError as error:
            raise _wrong(run, f"has a {file} that is no JSON: {error}") from error
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_bytes(content)


def _tensors(run: Storage, file: str, size: int) -> dict[str, Stored]:
    """Content of the header, if the file ends where it should."""
    length = int.from_bytes(run.read_range(f"{FOLDER}/{file}", 0, HEADER_LENGTH_BYTES), "little")
    start = HEADER_LENGTH_BYTES + length
    if start > size:
        raise _wrong(run, f"has a {file} of {size:,} bytes, whose header would end at {start:,}")
    try:
        header = json.loads(run.read_range(f"{FOLDER}/{file}", HEADER_LENGTH_BYTES, start))
    except ValueError as error:
        raise _wrong(run, f"has a {file} whose header is no JSON: {error}") from error
    header.pop("__metadata__", None)
    ends = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    info = run.stat(f"{FOLDER}/{file}")
    if info is None or not ends == size == info.size_bytes:
        there = "no file" if info is None else f"{info.size_bytes:,} bytes"
        raise _wrong(run, f"has {there} for {file}, whose header describes {ends:,} bytes")
    return {name: Stored(file, TYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in header.items()}


def _require_tensors(run: Storage, stored: dict[str, Stored], expected: Mapping[str, Tensor]) -> None:
    if missing := sorted(expected.keys() - stored.keys()):
        raise _wrong(run, f"lacks {len(missing)} tensors of the published model, for example {missing[0]}")
    if unknown := sorted(stored.keys() - expected.keys()):
        raise _wrong(run, f"has {len(unknown)} tensors that the published model lacks, for example {unknown[0]}")
    for name, tensor in expected.items():
        there = stored[name]
        if (there.dtype, there.shape) != (tensor.dtype, tuple(tensor.shape)):
            text = f"has {name} as {there.shape} of {there.dtype} instead of {tuple(tensor.shape)} of {tensor.dtype}"
            raise _wrong(run, text)


def _require_index(run: Storage, index: Path, stored: dict[str, Stored]) -> None:
    files = {tensor.file for tensor in stored.values()}
    if not index.is_file():
        if len(files) > 1:
            raise _wrong(run, f"has {len(files)} files with weights and no {index.name}")
        return
    weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    if weight_map != {name: tensor.file for name, tensor in stored.items()}:
        raise _wrong(run, f"has a {index.name} that places tensors in other files than they are in")


def _adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    rows = rows_in(model)
    tensors: dict[str, Tensor] = {
        stored: model.get_parameter(name)[: len(rows[name])] if name in rows else model.get_parameter(name)
        for name, stored in stored_names(model).items()
    }
    return tensors | {older: tensors[stored] for stored, older in older_keys(model).items()}


def _load_model(folder: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    """Names of weights that are missing and that are not known."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    _, info = kind_of(type(config)).from_pretrained(
        None,
        config=config,
        state_dict=dict(tensors),
        device_map={"": "meta"},
        output_loading_info=True,
        dtype=next(model.parameters()).dtype,
        trust_remote_code=False,
    )
    return [*info["missing_keys"], *map(str, info["mismatched_keys"])], list(info["unexpected_keys"])


def _load_adapter(folder: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    import peft

    with parameters_on_meta(), no_init_weights():  # else the whole base is made in fp32, and drawn
        base: object = AutoModelForImageTextToText.from_config(model.config, trust_remote_code=False)
    on_base = peft.get_peft_model(base, peft.PeftConfig.from_pretrained(str(folder)), low_cpu_mem_usage=True)
    result = peft.set_peft_model_state_dict(on_base, dict(tensors), low_cpu_mem_usage=True)
    # Not of a tied head, whose rows PEFT takes from the embedding.
    elsewhere = tuple(f"{PREFIX}{head.rpartition('.')[0]}." for head in heads_of_rows(model))
    missing = [
        name
        for name in result.missing_keys
        if any(part in name for part in PARTS) and ADAPTER in name and not name.startswith(elsewhere)
    ]
    return missing, sorted(set(result.unexpected_keys) - set(older_keys(model).values()))


def _wrong(run: Storage, text: str) -> UserError:
    return UserError(
        f"the export in {run.uri(FOLDER)} {text}",
        expected="what transformers and vLLM read of a published model of this type",
        fix="run vlmpipe diagnose and report it: the checkpoint is whole, and sync-checkpoint can be repeated from it "
        "with another version of vlmpipe",
        code=ExitCode.BAD_EXPORT,
    )
