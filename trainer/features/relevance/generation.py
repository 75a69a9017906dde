"""Prompts with selected visual tokens, for `generate` of a plain transformers model.

It takes the kept tokens through the hook for precomputed encoder outputs, and their original positions as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from vlmpipe.trainer.config.arr_coc.channels import CHANNELS
from vlmpipe.trainer.features.relevance.allocation import Kept
from vlmpipe.trainer.features.relevance.module import Relevance, RelevanceModule, pooled


@dataclass(frozen=True, eq=False)
class Selection:
    """The relevance and the selected tokens of one image of a prompt."""

    found: Relevance
    kept: Kept


@torch.no_grad()
def selected_inputs(model: nn.Module, input_ids: Tensor, projected: Tensor, grids: Tensor | None) -> dict[str, object]:
    """The model's arguments for prompts without the tokens that they do not keep.

    Args:
        model: the library's, with its part `relevance`.
        input_ids: (prompts, tokens), padded on the left, each image with all its tokens.
        projected: (image tokens, levels x hidden + channels), textures last.
        grids: (images, 3), in patches.
    """
    config, textures = model.config, projected[:, -len(CHANNELS) :]
    selections = [relevance.kept for relevance in relevance_of_prompts(model, input_ids, textures, grids)]
    is_image, real = input_ids == config.image_token_id, _real(model, input_ids)
    counts = _counts(model, grids)
    positions = _positions(model, input_ids, real, is_image, grids)
    stays = real.clone()
    for selection, places in zip(selections, is_image.nonzero().split(counts), strict=True):
        prompt, columns = places[0, 0], places[: len(selection), 1]
        stays[prompt, places[len(selection) :, 1]] = False
        start = positions[1, prompt, places[0, 1]].clone()
        positions[1, prompt, columns] = start
        positions[2:, prompt, columns] = start + selection.places.T
    order = stays.long().argsort(dim=1, stable=True)  # what is left out goes to the left, to the padding
    order = order[:, -int(stays.sum(1).max()) :]
    attention_mask = stays.gather(1, order)
    ids = input_ids.masked_fill(~stays, config.text_config.pad_token_id).gather(1, order)
    positions = positions.gather(2, order.expand(4, -1, -1))
    positions[0] = (attention_mask.cumsum(1) - 1).clamp(min=0)
    images = [
        selection.pool(tokens)
        for selection, tokens in zip(selections, projected[:, : -len(CHANNELS)].split(counts), strict=True)
    ]
    return {
        "input_ids": ids,
        "attention_mask": attention_mask.long(),
        "position_ids": positions,
        "mm_encoder_outputs": {"image": encoder_output(images, model)},
    }


@torch.no_grad()
def relevance_of_prompts(
    model: nn.Module, input_ids: Tensor, textures: Tensor, grids: Tensor | None
) -> list[Selection]:
    """Selections of the prompts' image tokens. textures: (image tokens, channels); other arguments: see
    `selected_inputs`.
    """
    module: RelevanceModule = model.relevance
    is_image = input_ids == model.config.image_token_id
    special = torch.tensor(module.special_ids, device=input_ids.device)
    is_question = _real(model, input_ids) & ~is_image & ~torch.isin(input_ids, special)
    embeddings = model.get_input_embeddings()(input_ids[is_question])
    questions = pooled(embeddings, is_question.nonzero()[:, 0], len(input_ids))
    relevances, counts, merge = [], _counts(model, grids), int(model.config.vision_config.spatial_merge_size)
    owners = is_image.nonzero()[:, 0].split(counts)
    for owned, image, (_, rows, columns) in zip(owners, textures.split(counts), _listed(grids), strict=True):
        relevance = module(image, questions[owned[0]])
        ids = input_ids[owned[0]][is_question[owned[0]]].tolist()
        relevances.append(Selection(relevance, module.select(relevance, (rows // merge, columns // merge), ids)))
    return relevances


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


def _listed(grids: Tensor | None) -> list[list[int]]:
    return [] if grids is None else grids.tolist()


def _counts(model: nn.Module, grids: Tensor | None) -> list[int]:
    """Tokens of each image."""
    merge = int(model.config.vision_config.spatial_merge_size)
    return [rows * columns // merge**2 for _, rows, columns in _listed(grids)]


def _real(model: nn.Module, input_ids: Tensor) -> Tensor:
    """(prompts, tokens) false for the padding on the left."""
    return (input_ids != model.config.text_config.pad_token_id).cumsum(1) > 0


def _positions(model: nn.Module, input_ids: Tensor, real: Tensor, is_image: Tensor, grids: Tensor | None) -> Tensor:
    """(4, prompts, tokens) of prompts with all their image tokens."""
    axes, _ = model.model.get_rope_index(
        input_ids, mm_token_type_ids=is_image.int(), image_grid_thw=grids, attention_mask=real.long()
    )
    return torch.cat([axes[:1], axes])
