"""Replaces the embeddings of image tokens by image features without reading the device.

Indexing by a mask reads the device, because the number of true values decides the result's size; so does the gradient
of `masked_scatter`. Here the host knows that number from the shape of the features.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from vlmpipe.trainer.errors import ConfigError, DataError


def require_tokens(count: int, expected: int | None) -> None:
    """Raise DataError when images give more or fewer tokens than their sequences expect. None: not known."""
    if expected is not None and count != expected:
        raise DataError(
            f"the images of a micro-batch give {count} tokens, and its sequences expect {expected}",
            expected="as many as the prepared data says of these images",
            fix="prepare the data again with this model section, or set features.cache to off",
        )


def places_of(is_image: Tensor, count: int) -> Tensor:
    """(count,) positions of image tokens in the flattened sequences.

    is_image: (sequences, tokens), true `count` times; more than that is an error of the device.
    """
    flat = is_image.flatten()
    nth = flat.cumsum(0) * flat  # from 1; other tokens go to 0, which is dropped
    places = torch.zeros(count + 1, dtype=torch.int64, device=flat.device)
    return places.scatter_(0, nth, torch.arange(len(flat), device=flat.device))[1:]


def put(embeddings: Tensor, places: Tensor, images: Tensor) -> Tensor:
    """Embeddings (sequences, tokens, hidden) with those of images, (image tokens, hidden), at `places`."""
    # Its backward pass saves only the places; those of `index_copy` and `index_add` save the images too.
    flat = embeddings.flatten(0, 1).index_put((places,), images.to(embeddings.dtype))
    return flat.view_as(embeddings)


def embedded(model: nn.Module, input_ids: Tensor, images: Tensor) -> Tensor:
    """Token embeddings with projected images in place of image tokens: (sequences, tokens, hidden).

    model: the library's. images: (..., hidden), one for each image token, in order. The library's forward pass
    would index by a mask.
    """
    images = images.reshape(-1, images.shape[-1])
    places = places_of(input_ids == model.config.image_token_id, len(images))
    return put(model.get_input_embeddings()(input_ids), places, images)


def add_levels_at_places(language_model: nn.Module) -> None:
    """Have a DeepStack language model accept positions, (image tokens,), instead of a mask of image tokens.

    Masks still work. Raises ConfigError for a release of transformers with a different method.
    """
    theirs = getattr(type(language_model), "_deepstack_process", None)
    takes = ["self", "hidden_states", "visual_pos_masks", "visual_embeds"]
    if theirs is None or list(inspect.signature(theirs).parameters) != takes:
        raise ConfigError(
            "this release of transformers adds images after language layers in an unknown way",
            expected="the version in constraints.txt",
            fix="install that one",
        )

    def add(hidden: Tensor, places: Tensor, level: Tensor) -> Tensor:
        """(sequences, tokens, hidden) with (image tokens, hidden) added."""
        if places.dtype == torch.bool:
            added: Tensor = theirs(language_model, hidden, places, level)
            return added
        flat = hidden.flatten(0, 1).index_put((places,), level.to(hidden.dtype), accumulate=True)
        return flat.view_as(hidden)

    language_model._deepstack_process = add
