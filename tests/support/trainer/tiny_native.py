"""Tiny native vision-language models: Qwen2.5-VL with its windows, Qwen3-VL with a level of DeepStack, SmolVLM with
images that are one tile and, as `smolvlm_tiles`, with images that are cut."""

from __future__ import annotations

from typing import Any

from vlmpipe.trainer.config.model import GRID_FAMILIES

TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 300,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
}  # fmt: skip
VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
# Windows of 2 x 2 tokens in the first layer: larger images have several.
WINDOWS = {"window_size": 16, "fullatt_block_indexes": [1]}
# DeepStack: what the first layer of the tower gives reaches the first language layer.
LEVELS = {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
# Four tokens an image, each of four patches.
SQUARE = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 16,
}  # fmt: skip
LLAMA = {name: value for name, value in TEXT.items() if name != "rope_parameters"} | {"model_type": "llama"}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"model_type": "qwen2_5_vl", "vision_config": VISION | WINDOWS, "text_config": TEXT},
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "vision_config": VISION | LEVELS,
        "text_config": TEXT | {"head_dim": 8},
    },
    "smolvlm": {
        "model_type": "smolvlm",
        "scale_factor": 2,
        "vision_config": SQUARE,
        "text_config": LLAMA,
    },
}
TILES = "_tiles"  # ends the name of a family whose images are cut: into two tiles along the longer side, and the whole
CONFIGS["smolvlm" + TILES] = CONFIGS["smolvlm"]


def model_section(family: str, **changes: Any) -> dict[str, Any]:
    whole = {"config": CONFIGS[family]}
    sizes = {"min_pixels": 256, "max_pixels": 2048} if family in GRID_FAMILIES else {"image_size": 16}
    if family.endswith(TILES):
        sizes["longest_edge"] = 32
    return {"family": family.removesuffix(TILES), "pretrained": whole, "tokenizer": "train:300", **sizes} | changes
