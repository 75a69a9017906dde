"""Small models of every kind, whose FLOPs by formula are compared with what torch counts."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.trainer.tiny_native import model_section
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.train_options import Checkpointing
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.flops import flops_per_sequence
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape, inputs_of

SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 8,
    "vision_use_head": False,
}
CLIP = SIGLIP | {"model_type": "clip_vision_model"}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA = QWEN2 | {"model_type": "llama", "num_key_value_heads": 4, "num_hidden_layers": 2, "tie_word_embeddings": True}
WIDE_HEADS = QWEN2 | {"model_type": "qwen3", "head_dim": 32}
ROWS, ROW_TOKENS, ROW_SAMPLES, IMAGES, LABELS = 2, 192, 2, 3, 50
IMAGE = 32  # side, in pixels

# Three images of 4 x 5 tokens: Qwen2.5-VL's windows of 2 x 2 tokens cut them into unequal pieces.
NATIVE_IMAGE_TOKENS = 20
QWEN2_5_VL, QWEN3_VL = (
    {"family": family, "max_pixels": NATIVE_IMAGE_TOKENS * 64} for family in ("qwen2_5_vl", "qwen3_vl")
)

ALL = ("tower", "projector", "language_model")
CASES: dict[str, dict[str, Any]] = {
    "siglip and qwen2 with grouped queries": {},
    "clip and llama with a tied head": {"tower": CLIP, "language_model": LLAMA, "feature_select": "drop_cls"},
    "clip with its class token, the layer before the last": {"tower": CLIP, "feature_layer": -2},
    "heads wider than the hidden size": {"language_model": WIDE_HEADS},
    "siglip with its pooling head": {"tower": SIGLIP | {"vision_use_head": True}},
    "nothing frozen": {"freeze": ()},
    "nothing frozen, an early feature layer": {"freeze": (), "feature_layer": 1},
    "nothing frozen, clip, the layer before the last": {"tower": CLIP, "freeze": (), "feature_layer": -2},
    "only the projector is trained": {"freeze": ("tower", "language_model")},
    "only the tower is trained": {"freeze": ("projector", "language_model")},
    "only the language model is trained": {"freeze": ("tower", "projector")},
    "adapters": {"lora": {"rank": 4}},
    "adapters on two layers of a block": {"lora": {"rank": 8, "targets": ["q_proj", "v_proj"]}},
    "adapters, nothing else is trained": {"lora": {"rank": 4}, "freeze": ("tower", "projector")},
    "adapters and the tower": {"lora": {"rank": 4}, "freeze": ()},
    "adapters in all parts": {"lora": {"rank": 4, "parts": ALL}, "freeze": ()},
    "adapters in the tower alone": {"lora": {"rank": 4, "parts": ["tower"]}, "freeze": ("projector", "language_model")},
    "the last language layer and the head": {"freeze": ALL, "train_parameters": ["*layers.2.*", "lm_head.*"]}
    | {"tower": SIGLIP | {"num_hidden_layers": 2}},
    "the head alone": {"freeze": ALL, "train_parameters": ["lm_head.*"]},
    "half of each layer": {
        "freeze_parameters": ["*language_model*self_attn*", "*language_model.layers.1.mlp.up_proj*"]
    },
    "a tower thawed in part": {"freeze": ("tower",), "train_parameters": ["*vision_tower*layers.[12].*"]},
    "norms of the tower": {"freeze": ("tower",), "train_parameters": ["*vision_tower*layer_norm*"]},
    "qwen2.5-vl": QWEN2_5_VL,
    "qwen2.5-vl, the last language layers": QWEN2_5_VL
    | {"freeze": ALL, "train_parameters": ["*language_model.layers.[12].*", "*language_model.norm.*"]},
    "qwen2.5-vl, nothing frozen": QWEN2_5_VL | {"freeze": ()},
    "qwen2.5-vl, only the projector is trained": QWEN2_5_VL | {"freeze": ("tower", "language_model")},
    "qwen3-vl": QWEN3_VL,
    "qwen3-vl, nothing frozen": QWEN3_VL | {"freeze": ()},
    "qwen3-vl, adapters": QWEN3_VL | {"lora": {"rank": 4}},
    "qwen2.5-vl, adapters in all parts": QWEN2_5_VL | {"lora": {"rank": 4, "parts": ALL}, "freeze": ()},
}


def model_config(
    tower: dict[str, Any] = SIGLIP, language_model: dict[str, Any] = QWEN2, *, family: str = "llava", **more: Any
) -> ModelConfig:
    if family != "llava":
        return ModelConfig.model_validate(model_section(family, **more))
    parts = {"tower": {"config": tower}, "language_model": {"config": language_model}}
    return ModelConfig.model_validate(parts | {"tokenizer": "train:300", "image_size": IMAGE} | more)


def counted(config: ModelConfig, *, cached: bool, checkpointing: Checkpointing) -> int:
    """FLOPs of one forward and backward pass over rows of two samples each, by torch's counter."""
    family = family_of(config)
    model = family.skeleton(config, vocabulary=300)
    module = family.training_module(config, model, cached=cached).train()
    Recompute(layers=checkpointing).apply(family, module)
    inputs = inputs_of(
        config, SequenceShape(ROWS, ROW_TOKENS, IMAGES, ROWS * LABELS), 300, cached=cached, sequence_samples=ROW_SAMPLES
    )
    inputs["label_index"] = torch.arange(ROWS * LABELS)
    # The CPU's fused attention kernel has no formula in torch's counter: it would count as nothing.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(**inputs).backward()
    return counter.get_total_flops()


def by_formula(config: ModelConfig, *, cached: bool, checkpointing: Any) -> float:
    """The same FLOPs from the model's sizes."""
    row = flops_per_sequence(
        family_of(config).shape(config),
        sequence_length=ROW_TOKENS,
        images=IMAGES / ROWS,
        label_tokens=LABELS,
        cached=cached,
        activation_checkpointing=checkpointing,
        feature_layer=config.feature_layer,
        sample_pairs=ROW_TOKENS**2 / ROW_SAMPLES,
    )
    return ROWS * row.total


# Features of a trained tower cannot be cached.
THAWED = ("a tower thawed in part", "norms of the tower")
CACHEABLE = [
    (name, True) for name, parts in CASES.items() if "tower" in parts.get("freeze", ("tower",)) and name not in THAWED
]
