"""Model types of transformers, each with the configuration of a tiny model and of its processor."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

WIDTH, LAYERS, VOCABULARY = 32, 2, 320
END = "<|end|>"
TEXT: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024, "vocab_size": VOCABULARY,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 16,
}  # fmt: skip
SQUARE = {"height": 16, "width": 16}
PINPOINTS = [[16, 32], [32, 16], [32, 32]]
# Encoders of patches with a merger, and positions of three axes.
MROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
HYBRID = MROPE | {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
WHOLE_MROPE = {"rope_parameters": MROPE["rope_parameters"] | {"partial_rotary_factor": 1.0}}
# Experts of a width that torch multiplies in bf16 too: rows of a multiple of 16 bytes.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
PATCHES = {"depth": LAYERS, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
PIXELS = {"size": {"shortest_edge": 256, "longest_edge": 2048}, "patch_size": 4, "merge_size": 2}
QWEN: dict[str, Any] = {
    "images": PIXELS, "tokens": ("<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "around": ("<|vision_start|>", "<|vision_end|>"),
}  # fmt: skip
GLM: dict[str, Any] = {
    "images": PIXELS, "tokens": ("<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>"),
    "around": ("<|begin_of_image|>", "<|end_of_image|>"),
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """What is special about a model type. Entries of `config` and `images` are those of the published files."""

    placeholder: str  # what the chat template writes for an image
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    images: dict[str, Any] = field(default_factory=dict)  # settings of the image processor
    processor: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()  # special ones beside the placeholder
    words: tuple[str, ...] = ()  # tokens that are no special ones
    named: dict[str, str] = field(default_factory=dict)  # special tokens by the names that processors ask for
    video_token: str = ""  # named by the configuration; empty: it has the type's usual number, of some other token
    image_token: str = ""  # what features replace; empty: the placeholder
    images_of: str = ""  # the type whose image processor it has, where transformers maps none to it
    around: tuple[str, str] = ("", "")  # written by the template before and behind each placeholder
    needs_torchvision: bool = False  # for its processor
    processor_class: str = ""  # in its files, where transformers maps none to the type
    begins: str = ""  # what the template writes first


KINDS: dict[str, Kind] = {
    "internvl": Kind(
        "<IMG_CONTEXT>",
        text={"model_type": "qwen2"},
        vision={"patch_size": [4, 4], "image_size": [16, 16]},
        config={"downsample_ratio": 0.5},
        images={"size": SQUARE, "min_patches": 1, "max_patches": 2},
        processor={"image_seq_length": 4},
        tokens=("<img>", "</img>", "<video>"),
        named={
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "gemma3": Kind(
        "<start_of_image>",
        text={"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        vision={"model_type": "siglip_vision_model"},
        config={"mm_tokens_per_image": 4},
        images={"size": SQUARE},
        processor={"image_seq_length": 4},
        tokens=("<image_soft_token>", "<end_of_image>"),
        words=("\n", "\n\n", "\n\n\n", "\n\n\n\n"),  # vLLM looks for them
        named={
            "image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"
        },
        image_token="<image_soft_token>",
    ),
    "qwen2_vl": Kind("<|image_pad|>", text=MROPE, vision=PATCHES | {"embed_dim": 16, "hidden_size": WIDTH}, **QWEN),
    "qwen2_5_vl": Kind(
        "<|image_pad|>",
        text=MROPE,
        vision=PATCHES | {"out_hidden_size": WIDTH, "window_size": 16, "fullatt_block_indexes": [1]},
        **QWEN,
    ),
    "qwen3_vl": Kind(
        "<|image_pad|>",
        text=MROPE,
        vision=PATCHES | {"out_hidden_size": WIDTH, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **QWEN,
    ),
    "qwen3_5": Kind(
        "<|image_pad|>",
        text=HYBRID,
        vision=PATCHES | {"out_hidden_size": WIDTH, "num_position_embeddings": 16},
        **QWEN,
    ),
    "qwen3_5_moe": Kind(
        "<|image_pad|>",
        text=HYBRID | EXPERTS | {"shared_expert_intermediate_size": 16},
        vision=PATCHES | {"out_hidden_size": WIDTH, "num_position_embeddings": 16},
        **QWEN,
    ),
    "lfm3_vl": Kind(
        "<|image_pad|>",
        text={"model_type": "lfm3", "layer_types": ["conv", "full_attention"], "sliding_window": 6},
        vision={"spatial_merge_size": 2, "temporal_patch_size": 2, "num_key_value_heads": 2, "head_dim": 8},
        config={"projector_hidden_size": 24},
        **QWEN,
    ),
    "glm_ocr": Kind(
        "<|image|>",
        text=WHOLE_MROPE,
        vision=PATCHES | {"out_hidden_size": WIDTH, "intermediate_size": 24},
        images_of="glm46v",
        processor_class="Glm46VProcessor",
        **GLM,
    ),
    "paddleocr_vl": Kind(
        "<|image_pad|>",
        text=MROPE,
        vision={"spatial_merge_size": 2},
        images={"min_pixels": 256, "max_pixels": 2048, "patch_size": 4, "merge_size": 2, "temporal_patch_size": 1},
        tokens=("<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
        named={"image_token": "<|image_pad|>"},
        around=("<|vision_start|>", "<|vision_end|>"),
    ),
    "glm4v": Kind(
        "<|image|>", text=WHOLE_MROPE, vision=PATCHES | {"out_hidden_size": WIDTH, "intermediate_size": 24}, **GLM
    ),
    "glm46v": Kind(
        "<|image|>", text=WHOLE_MROPE, vision=PATCHES | {"out_hidden_size": WIDTH, "intermediate_size": 24}, **GLM
    ),
    "gemma4": Kind(
        "<|image|>",
        text={
            "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8,
            "use_bidirectional_attention": "vision",
            "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCABULARY,
        },
        vision={
            "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        images={"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2},
        tokens=("<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"),
        named={
            "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
            "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
        },
    ),
    "idefics3": Kind(
        "<image>",
        text={"model_type": "llama"},
        config={"scale_factor": 2},
        images={"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
        processor={"image_seq_len": 4},
        tokens=(
            "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
            *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
        ),
    ),
    "llava": Kind(
        "<image>",
        text={"model_type": "llama"},
        vision={"model_type": "clip_vision_model", "projection_dim": 8},
        config={"vision_feature_layer": -2},
        images={"size": {"shortest_edge": 16}, "crop_size": SQUARE},
        processor={"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "vipllava": Kind(
        "<image>",
        text={"model_type": "llama"},
        vision={"model_type": "clip_vision_model", "projection_dim": 8},
        config={"vision_feature_layers": [-2, -1]},
        images={"size": {"shortest_edge": 16}, "crop_size": SQUARE},
        processor={"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_next": Kind(
        "<image>",
        text={"model_type": "llama"},
        vision={"model_type": "clip_vision_model", "projection_dim": 8},
        config={"image_grid_pinpoints": PINPOINTS},
        images={"size": {"shortest_edge": 16}, "crop_size": SQUARE, "image_grid_pinpoints": PINPOINTS},
        processor={"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_onevision": Kind(
        "<image>",
        text={"model_type": "qwen2"},
        vision={"model_type": "siglip_vision_model", "vision_use_head": False},
        config={"image_grid_pinpoints": PINPOINTS},
        images={"size": SQUARE, "image_grid_pinpoints": PINPOINTS},
        processor={"num_image_tokens": 16, "patch_size": 4, "vision_feature_select_strategy": "full"},
        tokens=("<video>",),
        video_token="<video>",
    ),
    "lighton_ocr": Kind(
        "<|image_pad|>",
        text={"model_type": "qwen3"},
        vision={"model_type": "pixtral", "head_dim": 8, "image_size": 32},
        images={"size": {"longest_edge": 32}, "patch_size": {"height": 8, "width": 8}},
        processor={"patch_size": 4, "spatial_merge_size": 2},
        tokens=("<|vision_pad|>", "<|vision_end|>"),
        named={
            "image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>",
        },
    ),
    "aya_vision": Kind(
        "<image>",
        text={"model_type": "cohere2", "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        vision={"model_type": "siglip_vision_model", "vision_use_head": False},
        images={"size": SQUARE, "min_patches": 1, "max_patches": 2},
        processor={"patch_size": 4, "img_size": 16, "downsample_factor": 2},
        tokens=(
            "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL",
            *(f"TILE_{number}" for number in range(1, 13)),
        ),
        image_token="<|IMG_PATCH|>",
    ),
    "ovis2": Kind(
        "<image>",
        text={"model_type": "qwen2"},
        vision={"vocab_size": 24, "hidden_stride": 2},
        config={"visual_indicator_token_ids": [0] * 5, "hidden_size": WIDTH, "vocab_size": VOCABULARY},
        images={"size": SQUARE, "min_patches": 1, "max_patches": 2},
        processor={"image_seq_length": 4},
        tokens=("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
        image_token="<IMG_ATOM>",
    ),
    "qwen3_vl_moe": Kind(
        "<|image_pad|>",
        text=MROPE | EXPERTS,
        vision=PATCHES | {"out_hidden_size": WIDTH, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        images_of="qwen3_vl",
        **QWEN,
    ),
    "glm4v_moe": Kind(
        "<|image|>",
        text=WHOLE_MROPE | EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1},
        vision=PATCHES | {"out_hidden_size": WIDTH, "intermediate_size": 24},
        images_of="glm4v",
        **GLM,
    ),
    "qianfan_ocr": Kind(
        "<image>",
        text={"model_type": "qwen3"},
        vision={"patch_size": [4, 4], "image_size": [16, 16], "drop_path_rate": 0.0},
        config={"downsample_ratio": 0.5},
        images={"size": SQUARE, "min_patches": 1, "max_patches": 2},
        processor={"image_seq_length": 4},
        tokens=("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        named={
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        image_token="<IMG_CONTEXT>",
    ),
    "deepseek_vl": Kind(
        "<image_placeholder>",
        text={"model_type": "llama"},
        vision={"model_type": "siglip_vision_model", "vision_use_head": False},
        images={"size": SQUARE, "min_size": 4},
        processor={"num_image_tokens": 16},
        named={"image_token": "<image_placeholder>"},
    ),
    "mistral3": Kind(
        "[IMG]",
        text={"model_type": "mistral", "sliding_window": None},
        vision={"model_type": "pixtral", "head_dim": 8, "image_size": 32},
        config={"spatial_merge_size": 2, "vision_feature_layer": -1},
        images={"size": {"longest_edge": 32}, "patch_size": {"height": 8, "width": 8}},
        processor={"patch_size": 4, "spatial_merge_size": 2},
        tokens=("[IMG_BREAK]", "[IMG_END]"),
        needs_torchvision=True,
    ),
    "lfm2_vl": Kind(
        "<image>",
        text={"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        vision={"model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
        config={"downsample_factor": 2, "projector_hidden_size": 24},
        images={
            "tile_size": 16, "encoder_patch_size": 4, "min_image_tokens": 2, "max_image_tokens": 4, "max_tiles": 2,
            "min_tiles": 2, "size": SQUARE,
        },
        tokens=("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
            *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 3) for column in range(1, 3)),
        ),
        needs_torchvision=True,
    ),
    "molmo2": Kind(
        "<|image|>",
        text={"additional_vocab_size": 16},
        vision={
            "image_size": [16, 16], "num_position_embeddings": 16, "head_dim": 8, "num_key_value_heads": 2,
            "num_hidden_layers": LAYERS,
        },
        config={
            "adapter_config": {
                "vision_feature_layer": [-1, -2], "hidden_size": 16, "num_attention_heads": 2,
                "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "text_hidden_size": WIDTH,
            },
        },
        images={"size": SQUARE, "patch_size": 4, "max_crops": 2, "overlap_margins": [1, 1]},
        tokens=(
            "<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<frame_start>", "<im_end>", "<frame_end>",
            "<im_low>", "<|video|>",
        ),
        image_token="<im_patch>",
        begins="<s>",
        needs_torchvision=True,
    ),
    "kimi_k25": Kind(
        "<|media_pad|>",
        text={
            "model_type": "deepseek_v3", "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
            "num_key_value_heads": 4,
        },
        vision={"pos_emb_height": 4, "pos_emb_width": 4},
        config={"projection_hidden_size": 16},
        images={"size": {"max_height": 32, "max_width": 32}, "patch_size": 4, "max_patches": 64},
        tokens=("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|kimi_k25_video_placeholder|>"),
        needs_torchvision=True,
    ),
    "paligemma": Kind(
        "<image>",
        text={"model_type": "gemma"},
        vision={"model_type": "siglip_vision_model", "vision_use_head": False},
        config={"projection_dim": WIDTH},
        images={"size": SQUARE, "image_seq_length": 16},
    ),
}  # fmt: skip
KINDS["smolvlm"] = KINDS["idefics3"]  # its images are cut in the same way
INSTALLED = {name: kind for name, kind in KINDS.items() if not kind.needs_torchvision or find_spec("torchvision")}
