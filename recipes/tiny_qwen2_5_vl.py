"""Write a tiny Qwen2.5-VL with random weights: the base model of the recipes, for machines without a GPU.

    python recipes/tiny_qwen2_5_vl.py build/recipes/tiny-qwen2-5-vl

The folder has what the published models have: configuration, weights, tokenizer, chat template and processor.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from trainer.config.model import IMAGE_TOKEN
from trainer.data.sources.digits import DigitsSource
from vlmpipe.prove.tiny_model import SYSTEM, make_model, make_tokenizer, save_tiny_model

MODEL_TYPE = "qwen2_5_vl"
SIDE = 56  # pixels of a picture, which become four tokens
VISION = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128, "window_size": SIDE,
    "fullatt_block_indexes": [1],
}  # fmt: skip
TEXT = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 1024, "bos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
}  # fmt: skip


def training_texts() -> Iterator[str]:
    """What the tokenizer is made for: the digits' questions and answers."""
    for sample in itertools.islice(DigitsSource(validation_fraction=0.1), 600):
        yield f"system\n{SYSTEM}"
        for turn in sample.turns:
            yield f"user\n{turn.question.removeprefix(IMAGE_TOKEN).strip()}"
            yield "assistant\n"
            yield turn.answer


def main(folder: Path) -> None:
    tokenizer = make_tokenizer(MODEL_TYPE, training_texts())
    model = make_model(MODEL_TYPE, tokenizer, text=TEXT, vision=VISION)
    with torch.no_grad():
        for weight in model.model.visual.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1)  # else it takes several times as many steps to see
    save_tiny_model(model, tokenizer, folder, side=SIDE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
