"""Tiny native vision-language models, and data whose pictures differ in shape and number."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

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
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"model_type": "qwen2_5_vl", "vision_config": VISION | WINDOWS, "text_config": TEXT},
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "vision_config": VISION | LEVELS,
        "text_config": TEXT | {"head_dim": 8},
    },
}
SIZES = ((16, 16), (40, 16), (24, 56), (64, 64), (17, 31))  # (width, height) in pixels


def model_section(family: str, **changes: Any) -> dict[str, Any]:
    whole = {"config": CONFIGS[family]}
    sizes = {"min_pixels": 256, "max_pixels": 2048}
    return {"family": family, "whole": whole, "tokenizer": "train:300", **sizes} | changes


def picture(seed: int, size: tuple[int, int]) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def write_data(folder: Path, samples: int = 24) -> dict[str, Any]:
    """LLaVA records with none, one or two pictures each. Returns the fields of the data section that read them."""
    folder.mkdir()
    records = []
    for number in range(samples):
        names = [f"{number}-{place}.png" for place in range(number % 3)]
        for place, name in enumerate(names):
            (folder / name).write_bytes(picture(number * 2 + place, SIZES[(number + place) % len(SIZES)]))
        question = "<image>\n" * len(names) + f"which number is this, {number} or {number + 1}?"
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": f"it is {number}"}]
        records.append({"id": f"sample-{number:02}", "conversations": turns} | ({"image": names} if names else {}))
    (folder / "records.json").write_text(json.dumps(records))
    return {"source": str(folder / "records.json"), "image_folder": str(folder), "row_tokens": 256, "shard_samples": 20}
