"""Puts image features in the places of image tokens, without reading the device.

A mask as an index is read: how many places it has decides the size of the result, and the host waits for that.
`masked_scatter` has such an index in its gradient. Here the host says how many there are, as the images' shape does.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError, DataError


def require_tokens(found: int, expected: int | None) -> None:
    """Raise DataError when images give another number of tokens than rows have places for. None: not known."""
    if expected is not None and found != expected:
        raise DataError(
            f"the images of a micro-batch give {found} tokens, and its rows have places for {expected}",
            expected="as many as the prepared data says of these images",
            fix="prepare the data again with this model section, or set features.cache to off",
        )


def places_of(is_image: Tensor, count: int) -> Tensor:
    """(count,) places of image tokens in the flattened rows. is_image: (rows, tokens), true `count` times; more often
    is an error of the device."""
    flat = is_image.flatten()
    nth = flat.cumsum(0) * flat  # from 1 on; all other tokens go to 0, which is dropped
    places = torch.zeros(count + 1, dtype=torch.int64, device=flat.device)
    return places.scatter_(0, nth, torch.arange(len(flat), device=flat.device))[1:]


def put(embeddings: Tensor, places: Tensor, images: Tensor) -> Tensor:
    """(rows, tokens, hidden) embeddings with those of images, (image tokens, hidden), at their places."""
    # For its gradient `index_put` keeps the places alone, and `index_copy` and `index_add` all that is put there.
    flat = embeddings.flatten(0, 1).index_put((places,), images.to(embeddings.dtype))
    return flat.view_as(embeddings)


def embedded(model: nn.Module, input_ids: Tensor, images: Tensor) -> Tensor:
    """The tokens' embeddings, with projected images in place of the image tokens': (rows, tokens, hidden).

    model: one of the library's. images: (..., hidden), as many in order as there are image tokens.

    The library's own forward passes have the mask as an index, and of SmolVLM make images the type of the model's first
    weight, which under FSDP in bf16 is not that of the embeddings.
    """
    images = images.reshape(-1, images.shape[-1])
    places = places_of(input_ids == model.config.image_token_id, len(images))
    return put(model.get_input_embeddings()(input_ids), places, images)


def add_levels_at_places(language_model: nn.Module) -> None:
    """Have a language model that adds images behind layers take their places, (image tokens,), for its mask.

    With a mask it does as before. Raises ConfigError for a transformers whose method is another.
    """
    theirs: Any = getattr(type(language_model), "_deepstack_process", None)
    arguments = list(inspect.signature(theirs).parameters) if theirs else []
    if arguments != ["self", "hidden_states", "visual_pos_masks", "visual_embeds"]:
        raise ConfigError(
            "this transformers adds images behind language layers otherwise than is known here",
            expected="the version in constraints.txt",
            fix="install that one",
        )

    def add(hidden: Tensor, places: Tensor, level: Tensor) -> Any:
        """(rows, tokens, hidden) with (image tokens, hidden) added."""
        if places.dtype == torch.bool:
            return theirs(language_model, hidden, places, level)
        flat = hidden.flatten(0, 1).index_put((places,), level.to(hidden.dtype), accumulate=True)
        return flat.view_as(hidden)

    language_model._deepstack_process = add
