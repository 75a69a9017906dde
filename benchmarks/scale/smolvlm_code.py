"""CPU time of a SmolVLM in the checkout that it runs in, to compare two: images prepared, encoded, trained on.

    python -m benchmarks.scale.smolvlm_code

Prints one line of JSON. Uses nothing that families keep to themselves, so a copy runs in older checkouts too.
"""

from __future__ import annotations

import io
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.support.trainer.tiny_native import model_section
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.tokenize import make_tokenizer
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.models.image_tokens import image_form_of, sample_image_tokens
from vlmpipe.trainer.models.registry import family_of

TURNS = 5
SIZES = [(400, 300), (300, 400)]  # pixels
WHOLE: dict[str, Any] = {
    "model_type": "smolvlm",
    "scale_factor": 4,
    "vision_config": {
        "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 3,
        "patch_size": 16, "image_size": 256,
    },
    "text_config": {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 4096,
    },
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    tiles = {"image_size": 256, "longest_edge": 512}
    config = ModelConfig.model_validate(
        model_section("smolvlm", pretrained={"config": WHOLE}, tokenizer="train:500", freeze=[], **tiles)
    )
    form, family, prepare = image_form_of(config), family_of(config), image_preparer(config)
    tokenizer = make_tokenizer("train:500", ["USER: what is this? ASSISTANT: seven"], form)
    images = [photograph(number, size) for number, size in enumerate(SIZES)]
    turn = Turn("<image>\n<image>\nwhat is this?", "it is seven")
    ids = Chat(tokenizer, form).encode([turn], sample_image_tokens(config)(SIZES), SIZES).input_ids
    tokens = torch.tensor(ids)[None]
    module: Any = family.training_module(config, family.build(config, tokenizer), cached=False).train()
    inputs = {
        "input_ids": tokens,
        "position_ids": torch.arange(len(ids))[None],
        "label_index": torch.arange(len(ids) - 1),
        "label_ids": tokens[0, 1:],
        "samples": CuSeqlens.of([[len(ids)]], len(ids)),
        "images": prepare(images, [len(images)]).values,
    }
    tower, prepared = family.build_tower(config), [prepare([image], [1]) for image in images]
    loss = float(module(**inputs).detach())

    def encode() -> None:
        for made in prepared:
            family.encode(config, tower, made.values, made.grids)

    found = {
        "tokens": len(ids),
        "loss": loss,
        "prepare_ms": cpu_ms(lambda: prepare(images, [len(images)])) / len(images),
        "encode_ms": cpu_ms(encode) / len(images),
        "step_ms": cpu_ms(lambda: module(**inputs).backward()),
    }
    print(json.dumps(found))


def cpu_ms(run: Callable[[], object]) -> float:
    """The median of some turns, after one."""
    run()
    times = []
    for _ in range(TURNS):
        start = time.process_time()
        run()
        times.append(1000 * (time.process_time() - start))
    return statistics.median(times)


def photograph(seed: int, size: tuple[int, int]) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize(size).save(buffer, format="JPEG")
    return buffer.getvalue()


if __name__ == "__main__":
    main()
