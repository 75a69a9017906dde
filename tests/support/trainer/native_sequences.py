"""Packed sequences of native models, and what plain transformers takes of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from tests.support.trainer.tiny_native import TILES, model_section
from vlmpipe.trainer.config.model import IMAGE_TOKEN, ModelConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.tokenize import make_tokenizer
from vlmpipe.trainer.models.image_inputs import Images
from vlmpipe.trainer.models.image_tokens import image_form_of, image_tokens_of

Picture = tuple[int, tuple[int, int]]  # seed and size


def config_of(family: str, **changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(model_section(family, **changes))


def sequence_of(config: ModelConfig, samples: Sequence[Sequence[Picture]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (1, tokens) and positions (1, tokens) or (axes, 1, tokens) of samples in one row."""
    sizes = [[size for _, size in sample] for sample in samples]
    ids = [sample_ids(config, each) for each in sizes]
    places = [positions_of(config, tokens, each) for tokens, each in zip(ids, sizes, strict=True)]
    return torch.tensor([[token for sample in ids for token in sample]]), torch.from_numpy(
        np.expand_dims(np.concatenate(places, axis=-1), -2)
    )


def as_plain_transformers_takes(made: Images, input_ids: torch.Tensor, image_token: int) -> dict[str, torch.Tensor]:
    if made.grids is None:
        return {"pixel_values": made.values[None]} if len(made.values) else {}
    given = {"mm_token_type_ids": (input_ids == image_token).int()}
    grids = torch.tensor(made.grids)
    return given | ({"pixel_values": made.values, "image_grid_thw": grids} if made.grids else {})


def sample_ids(config: ModelConfig, sizes: list[tuple[int, int]]) -> list[int]:
    count, tokenizer = image_tokens_of(config), tokenizer_of(name_of(config))
    turns = [Turn(f"{IMAGE_TOKEN}\n" * len(sizes) + "what is this?", " it is 7")]
    return Chat(tokenizer, image_form_of(config)).encode(turns, [count(*size) for size in sizes], sizes).input_ids


def positions_of(config: ModelConfig, tokens: list[int], sizes: list[tuple[int, int]]) -> np.ndarray:
    """(tokens,) or (axes, tokens)."""
    if grids := image_form_of(config).grids:
        image_token = tokenizer_of(config.family).convert_tokens_to_ids(IMAGE_TOKEN)
        return grids.positions(np.array(tokens) == image_token, sizes)
    return np.arange(len(tokens))


@functools.cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    return trained_tokenizer("train:300", ["USER: what is this? ASSISTANT:", " 7"], config_of(family))


def name_of(config: ModelConfig) -> str:
    return config.family + (TILES if config.longest_edge else "")


def trained_tokenizer(name: str, texts: list[str], config: ModelConfig) -> PreTrainedTokenizerFast:
    return make_tokenizer(name, texts, image_form_of(config))
