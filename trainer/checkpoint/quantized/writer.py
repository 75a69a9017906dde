"""Writes a quantized copy of an export: the same files, with quantized layers in those of weights.

Weights are rounded to the nearest number that the format has. A scale is the largest value of its group over the
format's largest; nothing is calibrated, so that no data is needed and a layer is the same whatever came before it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from vlmpipe.trainer.checkpoint.quantized.layers import QuantizedLayers
from vlmpipe.trainer.config.checkpoint import QUANTIZED_PACKAGE, QuantizedFormat
from vlmpipe.trainer.errors import os_errors, require_package
from vlmpipe.trainer.storage.export_manifest import MARKER
from vlmpipe.trainer.storage.model_folders import CONFIG

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig

PRESETS: Mapping[QuantizedFormat, str] = {"int4": "W4A16", "fp8": "FP8_DYNAMIC"}  # compressed-tensors' own names
LAYOUTS: Mapping[QuantizedFormat, str] = {"int4": "pack-quantized", "fp8": "float-quantized"}
ENDING = ".safetensors"


def write_quantized(source: Path, target: Path, form: QuantizedFormat, layers: QuantizedLayers) -> None:
    """Copy the export in `source` to the new folder `target`, with its layers quantized.

    Memory holds one file of weights. Raises UserError (69) without the package of the extra `quantized`.
    """
    require_package(QUANTIZED_PACKAGE)
    settings = _settings(form, layers)
    names: dict[str, str] = {}
    size = 0
    with os_errors(f"writing {target}"):
        target.mkdir()
        for path in sorted(source.iterdir()):
            if path.name.endswith(ENDING):
                with safe_open(path, framework="pt") as file:
                    tensors = _quantized(file, set(layers.stored), settings)
                names |= dict.fromkeys(tensors, path.name)
                size += sum(tensor.nbytes for tensor in tensors.values())
                save_file(tensors, target / path.name, {"format": "pt"})
            elif path.name not in (MARKER, CONFIG, SAFE_WEIGHTS_INDEX_NAME):
                shutil.copyfile(path, target / path.name)
        if (source / SAFE_WEIGHTS_INDEX_NAME).is_file():
            _write_json(target / SAFE_WEIGHTS_INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": names})
        config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
        _write_json(target / CONFIG, config | {"quantization_config": settings.model_dump(mode="json")})


def _settings(form: QuantizedFormat, layers: QuantizedLayers) -> QuantizationConfig:
    """compressed-tensors' own configuration."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme

    scheme = preset_name_to_scheme(PRESETS[form], ["Linear"])
    if layers.group_size:
        assert scheme.weights
        scheme = scheme.model_copy(
            update={"weights": scheme.weights.model_copy(update={"group_size": layers.group_size})}
        )
    return QuantizationConfig(
        config_groups={"group_0": scheme.model_copy(update={"format": LAYOUTS[form]})},
        format=LAYOUTS[form],
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=layers.patterns(),
    )


def _quantized(file: safe_open, layers: set[str], settings: QuantizationConfig) -> dict[str, Tensor]:
    from compressed_tensors.compressors import BaseCompressor

    scheme = settings.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(settings.format)
    tensors: dict[str, Tensor] = {}
    for name in list(file.keys()):
        layer, _, part = name.rpartition(".")
        tensor = file.get_tensor(name)
        if layer not in layers or part != "weight":
            tensors[name] = tensor
            continue
        scale = _scale(tensor, scheme.weights)
        zero = torch.zeros_like(scale)
        parts = compressor.compress({"weight": tensor, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        tensors |= {f"{layer}.{stored}": value.contiguous() for stored, value in parts.items()}
    return tensors


def _scale(weight: Tensor, form: QuantizationArgs) -> Tensor:
    """(out, groups), in the type of the weight."""
    from compressed_tensors.quantization.utils import calculate_qparams

    grouped = weight.float().unflatten(1, (-1, form.group_size or weight.shape[1]))
    scale, _ = calculate_qparams(grouped.amin(2), grouped.amax(2), form)
    return scale.to(weight.dtype)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
