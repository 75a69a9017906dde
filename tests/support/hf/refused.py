"""Model types that people tune and that are refused here, each with the configuration of a tiny model.

Their folders hold settings and a tokenizer, no weights: a refusal comes before any is read.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from tests.support.hf.kinds import EXPERTS, GLM, KINDS, LAYERS, PATCHES, SQUARE, VISION, WIDTH, Kind
from tests.support.hf.publish import config_of, model_section, tokenizer_for
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.hf.trainability import require_trainable

TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
REFUSED: dict[str, Kind] = {
    "idefics2": Kind(
        "<image>",
        text={"model_type": "mistral", "sliding_window": None},
        images={"size": {"longest_edge": 32, "shortest_edge": 16}},
        tokens=("<fake_token_around_image>", "<end_of_utterance>"),
    ),
    "granite_docling": Kind(
        "<image>",
        vision={"out_hidden_size": WIDTH, "scale_factor": 2, "deepstack_visual_indexes": [0], "use_fine_route": False},
        images={"size": SQUARE},
        processor={"image_seq_len": 4},
        tokens=("<fake_token_around_image>", "<global-img>", *TILES),
    ),
    "mllama": Kind(
        "<|image|>",
        text={"cross_attention_layers": [1], **ROPE},
        vision={
            "attention_heads": 2, "num_global_layers": 1, "intermediate_layers_indices": [0], "vision_output_dim": 32,
            "supported_aspect_ratios": [[1, 1], [1, 2]], "max_num_tiles": 2,
        },
        images={"size": SQUARE, "max_image_tiles": 2},
        config={"image_token_index": 0},
    ),
    "glm5_next": Kind(
        "<|image|>",
        text=EXPERTS
        | {
            "layer_types": ["linear_attention", "deepseek_sparse_attention"], "n_routed_experts": 4,
            "n_shared_experts": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_head_dim": 8,
            "v_head_dim": 8, "index_head_dim": 8, "index_n_heads": 2, "linear_head_dim": 8, "linear_num_heads": 4,
            "num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"], "head_dim": 0, "n_group": 1,
            "topk_group": 1, "hc_mult": 2,
        },
        vision=PATCHES | {"out_hidden_size": WIDTH, "intermediate_size": 24, "projection_intermediate_size": 24},
        **GLM,
    ),
    "hunyuan_vl": Kind(
        "<|image_pad|>",
        text={"rope_parameters": ROPE["rope_parameters"] | {"mrope_section": [1, 1, 1, 1]}},
        vision={
            "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2, "out_hidden_size": WIDTH,
            "text_hidden_size": WIDTH, "spatial_merge_size": 2, "max_image_size": 64, "img_max_token_num": 64,
        },
        images={"patch_size": 4, "merge_size": 2, "min_pixels": 256, "max_pixels": 2048},
        tokens=("<im_s>", "<im_e>"),
        named={"image_token": "<|image_pad|>", "image_start_token": "<im_s>", "image_end_token": "<im_e>"},
    ),
    "minicpmv4_6": Kind(
        "<|image_pad|>",
        text={"model_type": "qwen3_5_text"},
        vision={"insert_layer_id": 0},
        config={"insert_layer_id": 0, "image_size": 16, "patch_size": 4},
        images={"scale_resolution": 32, "patch_size": 4},
    ),
    "minicpmv4_7": Kind("<|image_pad|>", text={"model_type": "qwen3_5_text"}),
    "florence2": Kind(
        "<image>",
        text={
            "model_type": "bart", "encoder_layers": 2, "decoder_layers": 2, "d_model": WIDTH, "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        },
        vision={
            "depths": [1], "patch_size": [4], "patch_stride": [4], "patch_padding": [0], "patch_prenorm": [False],
            "embed_dim": [16], "num_heads": [2], "num_groups": [2], "window_size": 4, "projection_dim": WIDTH,
        },
        images={"size": SQUARE, "crop_size": SQUARE, "image_seq_length": 17},
        named={"image_token": "<image>"},
    ),
    # Its encoder has 144 queries of an image, which the text has as tokens for 12 x 12 patches of the neck.
    "deepseek_ocr2": Kind(
        "<image>",
        text=EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
        vision={
            "sam_config": VISION | {
                "image_size": 192, "output_channels": 16, "downsample_channels": [16, 16], "window_size": 14,
                "global_attn_indexes": [1],
            },
            "encoder_config": VISION | {"num_key_value_heads": 2},
        },
        images={"size": {"height": 192, "width": 192}, "tile_size": 192},
        processor={"patch_size": 4},
    ),
    "phi4_multimodal": Kind("<image>"),
    "nemotron_h_omni": Kind(
        "<image>", text={"model_type": "nemotron_h"}, vision={"model_type": "radio", "video_temporal_patch_size": 2}
    ),
    "inkling_mm_model": Kind("<image>", text={"n_routed_experts": 4}),
    "llama4": Kind("<|patch|>", text={"num_local_experts": 2}, images={"size": SQUARE}),
    "gemma4_unified": KINDS["gemma4"],
    "muse_glimmer": Kind("<image>"),
    "gemma3n": Kind(
        "<image_soft_token>",
        vision={"model_type": "gemma3n_vision"},
        images={"size": SQUARE},
        tokens=("<boi>", "<eoi>", "<audio_soft_token>", "<boa>", "<eoa>"),
        named={
            "image_token": "<image_soft_token>", "boi_token": "<boi>", "eoi_token": "<eoi>",
            "audio_token": "<audio_soft_token>", "boa_token": "<boa>", "eoa_token": "<eoa>",
        },
    ),
    "minimax_m3_vl": Kind("<image>", vision=PATCHES),
    "step3p7": Kind("<image>"),
}  # fmt: skip

# Packages whose lack is the reason.
LACKED = dict.fromkeys(
    ("llama4", "gemma4_unified", "muse_glimmer", "minimax_m3_vl", "step3p7", "nemotron_h_omni", "inkling_mm_model"),
    "torchvision",
)
LACKED |= {"gemma3n": "timm"}


def write_settings(model_type: str, folder: Path) -> Path:
    """The files of a published model but for its weights."""
    kind = REFUSED[model_type]
    tokenizer = tokenizer_for(kind)
    config_of(kind, model_type, tokenizer, {}, {}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    classes = IMAGE_PROCESSOR_MAPPING_NAMES[kind.images_of or model_type]
    named = classes.get("pil") or classes["torchvision"]
    settings = {**kind.images, "image_processor_type": named.removesuffix("Pil")}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "processor_config.json").write_text(json.dumps(kind.processor))
    return folder


def refusal(model_type: str, folder: Path) -> ConfigError:
    """The error for a model of this type, which is written to `folder`."""
    config = ModelConfig.model_validate(model_section(write_settings(model_type, folder)))
    with pytest.raises(ConfigError) as caught:
        require_trainable(config, pack=True, cached=False)
    return caught.value
