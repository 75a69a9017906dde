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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from vlmpipe.prove.tiny_model import (
    CHAT_TEMPLATE,
    END,
    PAD,
    QWEN_MARK,
    SYSTEM,
    TURN,
    VIDEO,
    VISION_END,
    VISION_START,
    save_tiny_model,
)
from vlmpipe.trainer.config.model import IMAGE_PAD, IMAGE_TOKEN
from vlmpipe.trainer.data.sources.builtin.digits import DigitsSource

SPECIALS = (PAD, TURN, END, VISION_START, VISION_END, IMAGE_PAD, VIDEO)
SIDE = 56  # pixels of a picture, which become four tokens


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of the digits' questions."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(training_texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(SPECIALS),
        chat_template=CHAT_TEMPLATE.replace("IMAGE", QWEN_MARK),
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def training_texts() -> Iterator[str]:
    for sample in itertools.islice(DigitsSource(validation_fraction=0.1), 600):
        yield f"system\n{SYSTEM}"
        for turn in sample.turns:
            yield f"user\n{turn.question.removeprefix(IMAGE_TOKEN).strip()}"
            yield "assistant\n"
            yield turn.answer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    ids = dict(zip(SPECIALS, tokenizer.convert_tokens_to_ids(list(SPECIALS)), strict=True))
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 14,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128, "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        text_config={
            "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 4, "max_position_embeddings": 1024, "vocab_size": len(tokenizer),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "eos_token_id": ids[END], "pad_token_id": ids[PAD], "bos_token_id": None,
        },
        image_token_id=ids[IMAGE_PAD],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for weight in model.model.visual.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1)  # else it takes several times as many steps to see
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ids[END], ids[PAD]
    return model


def main(folder: Path) -> None:
    tokenizer = make_tokenizer()
    save_tiny_model(make_model(tokenizer), tokenizer, folder, side=SIDE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
