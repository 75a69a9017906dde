"""Prompts with selected visual tokens, for `generate` of a plain transformers model.

It takes the kept tokens through the hook for precomputed encoder outputs, and their original positions as arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from trainer.config.arr_coc.channels import CHANNELS
from trainer.models.arr_coc.allocation import Kept
from trainer.models.arr_coc.module import pooled


@torch.no_grad()
def selected_inputs(
    model: nn.Module, input_ids: Tensor, projected: Tensor, grids: Tensor | None
) -> tuple[dict[str, Any], list[Kept]]:
    """The model's arguments for prompts, padded on the left, and the tokens of each image that they keep.

    Args:
        model: the library's, with its part `relevance`.
        input_ids: (prompts, tokens), each image with all its tokens.
        projected: (image tokens, levels x hidden + channels), textures last.
        grids: (images, 3), in patches.
    """
    config, module = model.config, model.relevance
    device, merge = input_ids.device, int(config.vision_config.spatial_merge_size)
    sizes = [
        (int(rows) // merge, int(columns) // merge) for _, rows, columns in ([] if grids is None else grids.tolist())
    ]
    counts = [rows * columns for rows, columns in sizes]
    is_image = input_ids == config.image_token_id
    real = (input_ids != config.text_config.pad_token_id).cumsum(1) > 0
    special = torch.tensor(module.special_ids, device=device)
    is_question = real & ~is_image & ~torch.isin(input_ids, special)
    owners = is_question.nonzero()[:, 0]
    questions = pooled(model.get_input_embeddings()(input_ids[is_question]), owners, len(input_ids))
    prompts = is_image.nonzero()[:, 0].split(counts)
    kept = [
        module.select(module(textures, questions[own[0]]), grid, input_ids[own[0]][is_question[own[0]]].tolist())
        for textures, own, grid in zip(projected[:, -len(CHANNELS) :].split(counts), prompts, sizes, strict=True)
    ]
    positions = _positions(model, input_ids, real, is_image, grids)
    stays, image_places = real.clone(), is_image.nonzero().split(counts)
    for one, places in zip(kept, image_places, strict=True):
        first = places[: len(one)]
        prompt, columns = first[0, 0], first[:, 1]
        stays[places[len(one) :, 0], places[len(one) :, 1]] = False
        start = positions[1, prompt, places[0, 1]].clone()
        positions[1, prompt, columns] = start
        positions[2:, prompt, columns] = start + one.places.T
    order = stays.long().argsort(dim=1, stable=True)  # what is left out goes to the left, to the padding
    longest = int(stays.sum(1).max())
    order = order[:, -longest:]
    attention_mask = stays.gather(1, order)
    ids = input_ids.masked_fill(~stays, config.text_config.pad_token_id).gather(1, order)
    positions = positions.gather(2, order.expand(4, -1, -1))
    positions[0] = (attention_mask.cumsum(1) - 1).clamp(min=0)
    images = [one.pool(tokens) for one, tokens in zip(kept, projected[:, : -len(CHANNELS)].split(counts), strict=True)]
    return {
        "input_ids": ids,
        "attention_mask": attention_mask.long(),
        "position_ids": positions,
        "mm_encoder_outputs": {"image": encoder_output(images, model)},
    }, kept


def encoder_output(images: list[Tensor], model: nn.Module) -> BaseModelOutputWithPooling:
    """Kept tokens of each image, (tokens, levels x hidden), as the library's hook takes them."""
    levels = 1 + len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))
    width = int(model.config.vision_config.out_hidden_size)
    empty = torch.zeros(0, levels * width, device=next(model.parameters()).device)
    of_levels = [image.chunk(levels, dim=-1) for image in images or [empty]]
    first, *deeper = zip(*of_levels, strict=True)
    output = BaseModelOutputWithPooling(pooler_output=first)
    if deeper:
        output["deepstack_features"] = [list(level) for level in deeper]
    return output


def _positions(model: nn.Module, input_ids: Tensor, real: Tensor, is_image: Tensor, grids: Tensor | None) -> Tensor:
    """(4, prompts, tokens) of prompts with all their image tokens."""
    axes, _ = model.model.get_rope_index(
        input_ids, mm_token_type_ids=is_image.int(), image_grid_thw=grids, attention_mask=real.long()
    )
    return torch.cat([axes[:1], axes])
