"""Settings files of an export: what is written beside the weights, for readers of transformers 4.5x and 5.

transformers 5 writes names that 4.5x does not know or takes for something else: without these additions 4.5x computes
rotary positions with its own defaults, refuses the tokenizer, and finds no image processor. Both read one folder here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers.utils import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    IMAGE_PROCESSOR_NAME,
    PROCESSOR_NAME,
)

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.models.base import Family
from vlmpipe.trainer.models.hf_native.pretrained import set_dtype
from vlmpipe.trainer.models.published import published_json, stop_token_ids

TOKENIZER_NAME, TEMPLATE_NAME = "tokenizer_config.json", "chat_template.jinja"
GENERIC_TOKENIZERS = {"TokenizersBackend": "PreTrainedTokenizerFast"}  # name in transformers 5 -> one that both know
NAMED_TOKENS_ENDING = "_token"  # of special tokens that processors ask for by name
ORDINARY_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LOCAL_ROPE = "gemma3_text"  # the type of 4.5x with other rotary positions in sliding layers
AXIAL = "axial"  # positions in images, which 4.5x computes without a setting
# Type of a section -> names of settings in 4.5x and in 5.
RENAMED = {
    "qwen3_vl_moe_text": ("num_experts", "num_local_experts"),
    "vipllava": ("vision_feature_layers", "vision_feature_layer"),
}
# Of a published generation config: not how it samples, but which tokens it has, and who wrote it.
NOT_SAMPLING = ("transformers_version", "_from_model_config")


def save_settings(
    family: Family, config: ModelConfig, model: nn.Module, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write everything but the weights that plain `from_pretrained` reads, also that of transformers 4.5x."""
    _save_model_settings(model, tokenizer, folder, config.language_model)
    family.save_processor(config, tokenizer, folder)
    serve_older_readers(folder)


def _save_model_settings(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, folder: Path, published: WeightsConfig
) -> None:
    """Write the configurations of model and of generation, with the tokenizer's control tokens.

    Generation samples as the published model does, and also stops where it does. model: of the dtype in which its
    weights are stored; may be on the meta device.
    """
    ends = list(dict.fromkeys((tokenizer.eos_token_id, *stop_token_ids(published))))
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    set_dtype(model.config, next(model.parameters()).dtype)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    generation = model.generation_config.to_diff_dict()
    sampling = published_json(published, GENERATION_CONFIG_NAME)
    settings = {
        name: value for name, value in sampling.items() if not name.endswith("token_id") and name not in NOT_SAMPLING
    }
    _write(folder / GENERATION_CONFIG_NAME, generation | settings)


def serve_older_readers(folder: Path) -> None:
    """Add to settings files that transformers 5 wrote what 4.5x reads in their place. 5 reads the same as before."""
    _change(folder / CONFIG_NAME, _older_config)
    template = folder / TEMPLATE_NAME
    text = template.read_text(encoding="utf-8") if template.is_file() else ""
    _change(folder / TOKENIZER_NAME, lambda content: _older_tokenizer(content, text))
    if (folder / PROCESSOR_NAME).is_file() and not (folder / IMAGE_PROCESSOR_NAME).is_file():
        _write(
            folder / IMAGE_PROCESSOR_NAME,
            json.loads((folder / PROCESSOR_NAME).read_text(encoding="utf-8"))["image_processor"],
        )


def _older_config(content: dict[str, Any]) -> dict[str, object]:
    text = content.get("text_config")
    if text and "tie_word_embeddings" in content:
        text["tie_word_embeddings"] = content["tie_word_embeddings"]  # 4.5x asks the text's configuration
    for section in [content, *(value for value in content.values() if isinstance(value, dict))]:
        if "dtype" in section:
            section["torch_dtype"] = section["dtype"]
        if rope := section.get("rope_parameters"):
            section |= _older_rope(rope, section.get("model_type", ""))
        if names := RENAMED.get(section.get("model_type", "")):
            older, name = names
            section[older] = section[name]
    return content


def _older_rope(rope: dict[str, Any], model_type: str) -> dict[str, object]:
    """`rope_theta` and `rope_scaling`, for which 5 has `rope_parameters`."""
    if model_type == LOCAL_ROPE:
        local = {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
        return _older_rope(rope["full_attention"], "") | local
    if rope.get("rope_type") == AXIAL or "rope_theta" not in rope:
        return {}
    rope_fields = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    scaling = {name: value for name, value in rope.items() if name not in rope_fields}
    return rope_fields | ({} if scaling == {"rope_type": "default"} else {"rope_scaling": scaling})


def _older_tokenizer(content: dict[str, object], template: str) -> dict[str, object]:
    """5 lists further special tokens where 4.5x expects the named ones."""
    kind = content.get("tokenizer_class")
    content["tokenizer_class"] = GENERIC_TOKENIZERS.get(str(kind), kind)
    if isinstance(listed := content.get("extra_special_tokens", []), list):
        named = {
            name: value
            for name, value in content.items()
            if name.endswith(NAMED_TOKENS_ENDING) and name not in ORDINARY_TOKENS and isinstance(value, str)
        }
        content |= {"extra_special_tokens": named, "additional_special_tokens": listed}
    if template:
        content["chat_template"] = template
    return content


def _change(file: Path, change: Callable[[dict[str, object]], dict[str, object]]) -> None:
    if file.is_file():
        _write(file, change(json.loads(file.read_text(encoding="utf-8"))))


def _write(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
