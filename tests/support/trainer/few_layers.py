"""Models of transformers with five language layers, by family, that answer in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

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
        )
    ),
}
