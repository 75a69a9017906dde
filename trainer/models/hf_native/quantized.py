"""Opens exports by transformers, also quantized ones in the format compressed-tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from vlmpipe.trainer.config.checkpoint import QUANTIZED_PACKAGE
from vlmpipe.trainer.errors import ConfigError, require_package


def load_export(kind: type[PreTrainedModel], folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A model of `kind` on the CPU.

    Raises UserError (69) for a quantized one without the package of the extra `quantized`, ConfigError for one of which
    transformers leaves tensors out.
    """
    if not getattr(AutoConfig.from_pretrained(folder, trust_remote_code=False), "quantization_config", None):
        return kind.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    require_package(QUANTIZED_PACKAGE)
    model, info = kind.from_pretrained(folder, dtype=dtype, trust_remote_code=False, output_loading_info=True)
    if left := sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]])):
        raise ConfigError(
            f"transformers does not find or know {len(left)} tensors of the quantized export, for example {left[0]}",
            expected="an export whose every tensor is a weight or a scale of the model",
        )
    # By itself it would happen in the first call of the whole model, and evaluation calls its parts.
    model.hf_quantizer.compressor.decompress_model(model)
    return model
