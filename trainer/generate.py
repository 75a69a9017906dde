"""Greedy answers to questions about images, batched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


@torch.inference_mode()
def generate_answers(
    model: nn.Module, tokenizer: Any, prompts: Sequence[list[int]], features: Tensor, *, max_new_tokens: int
) -> list[str]:
    """Continue each prompt greedily to its end token.

    `features` are the projected image features of all prompts in order, (images, tokens, hidden); their tokens fill
    the image tokens of the prompts. Prompts are padded on the left, so that every answer starts at the same place.
    """
    device = features.device
    longest = max(len(ids) for ids in prompts)
    input_ids = torch.full((len(prompts), longest), tokenizer.pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(prompts):
        input_ids[row, longest - len(ids) :] = torch.tensor(ids)
        attention_mask[row, longest - len(ids) :] = 1
    input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
    embeddings = model.get_input_embeddings()(input_ids)  # (prompts, tokens, hidden)
    is_image = (input_ids == model.config.image_token_id).unsqueeze(-1).expand_as(embeddings)
    embeddings = embeddings.masked_scatter(is_image, features.to(embeddings.dtype))
    generated = model.generate(
        inputs_embeds=embeddings,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return [text.strip() for text in tokenizer.batch_decode(generated, skip_special_tokens=True)]
