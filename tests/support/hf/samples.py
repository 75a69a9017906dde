"""Samples with none, one or two images, and their packed sequence as a training module of family hf takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.trainer.native_models import SIZES
from vlmpipe.trainer.config.model import IMAGE_TOKEN, ModelConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.image_tokens import sample_image_tokens

SAMPLES = ([(1, SIZES[2]), (2, SIZES[1])], [], [(3, SIZES[3])], [(4, SIZES[4])])  # pictures by seed and size
RELATIVE = 1e-5


def ids_of(chat: Chat, config: ModelConfig, sizes: list[tuple[int, int]]) -> list[int]:
    turns = [Turn(f"{IMAGE_TOKEN}\n" * len(sizes) + "what is this?", "it is seven")]
    return chat.encode(turns, sample_image_tokens(config)(sizes), sizes).input_ids


def inputs_of(samples: Sequence[list[int]]) -> dict[str, Any]:
    """Of a sequence of these samples, in which the last token of each predicts nothing."""
    lengths = [len(sample) for sample in samples]
    row = torch.tensor([[token for sample in samples for token in sample]])
    ends = {sum(lengths[: number + 1]) - 1 for number in range(len(lengths))}
    index = torch.tensor([place for place in range(row.shape[1]) if place not in ends])
    return {
        "input_ids": row,
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "label_index": index,
        "label_ids": row[0, index + 1],
        "samples": CuSeqlens.of([lengths], row.shape[1]),
    }


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Taken from the model, which is left without any."""
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad(set_to_none=True)
    return found
