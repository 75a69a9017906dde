"""Models of transformers with five language layers, by family, that answer in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

IMAGE_TOKEN, START_TOKEN = 3, 4

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llava": lambda: LlavaForConditionalGeneration(
        LlavaConfig(
            text_config={"model_type": "qwen2", **TEXT},
            vision_config={
                "model_type": "siglip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 8,
            },
            image_token_id=IMAGE_TOKEN,
        )
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={**TEXT, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "num_heads": 2,
                "out_hidden_size": 32,
                "intermediate_size": 16,
            },
            image_token_id=IMAGE_TOKEN,
            vision_start_token_id=START_TOKEN,
        )
    ),
    "qwen3_vl": lambda: Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={**TEXT, "head_dim": 8, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
            vision_config={
                "depth": 2,
                "hidden_size": 16,
                "num_heads": 2,
                "out_hidden_size": 32,
                "intermediate_size": 16,
                "deepstack_visual_indexes": [0, 1],
                "num_position_embeddings": 16,
            },
            image_token_id=IMAGE_TOKEN,
            vision_start_token_id=START_TOKEN,
        )
    ),
}


def two_questions(kind: str, model: Any) -> dict[str, Tensor]:
    """Arguments of `generate`: two prompts of random tokens, each about a random image."""
    text, vision = torch.randint(5, 60, (2, 7)), model.config.vision_config
    if kind == "llava":  # by default it leaves the first patch out, which is no class token here
        ids = torch.cat([torch.full((2, 3), IMAGE_TOKEN), text], dim=1)
        return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16)}
    patch = 3 * vision.temporal_patch_size * vision.patch_size**2
    ids = torch.cat([torch.full((2, 1), START_TOKEN), torch.full((2, 4), IMAGE_TOKEN), text], dim=1)
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(2 * 16, patch),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),  # four patches are merged into one
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
    }
