"""Fake packed sequences for traces and measurements: all inputs of a training module with the right shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens, equal_lengths
from vlmpipe.trainer.models.image_tokens import image_form_of, image_tokens_of
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.image_grids import AXES, near_square

TokenGrid = tuple[int, int]  # rows and columns of an image, in tokens


@dataclass(frozen=True)
class SequenceShape:
    """One forward pass: packed `sequences` of `tokens` tokens, with `images` and `label_tokens` in all of them."""

    sequences: int
    tokens: int
    images: int
    label_tokens: int


def image_grids(config: ModelConfig, shape: SequenceShape) -> list[TokenGrid]:
    """Sizes of the images, for a family whose images differ in tokens.

    Images share the tokens that are not labels; each is as large as the family allows.
    """
    grids = image_form_of(config).grids
    assert grids is not None
    left, image_shapes = shape.sequences * shape.tokens - shape.label_tokens, []
    for images in range(shape.images, 0, -1):
        tokens = min(grids.max_tokens, -(-left // images))
        if tokens < 1:
            break
        image_shapes.append(near_square(tokens))
        left -= tokens
    return image_shapes


def inputs_of(
    config: ModelConfig,
    shape: SequenceShape,
    vocabulary: int,
    *,
    cached: bool,
    sequence_samples: int = 2,
    context_parallel: int = 1,
) -> dict[str, Any]:
    """Inputs of the training module: zeros, and image tokens.

    sequence_samples: samples of each sequence, of nearly equal length. With more than one, models without
    variable-length attention need a mask; the memory of others does not depend on the number.
    context_parallel: ranks that share the tokens; labels are those of one that has as many as it can have.
    """
    axes: tuple[int, ...] = ()
    if config.image_kind == "published":
        images, image_tokens = _projected_images(config, shape, cached=cached)
    elif config.image_kind == "grids":
        images, image_tokens = _images_of_any_shape(config, shape, cached=cached)
        axes = (AXES,)
    else:
        images, image_tokens = _square_images(config, shape, cached=cached)
    published = image_form_of(config).published
    labels = min(shape.label_tokens, shape.sequences * shape.tokens // context_parallel)
    lengths = equal_lengths(shape.tokens, sequence_samples)
    input_ids = torch.zeros(shape.sequences * shape.tokens, dtype=torch.int64)
    input_ids[:image_tokens] = published.image_token_id if published else vocabulary - 1
    return {
        "input_ids": input_ids.view(shape.sequences, shape.tokens),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).repeat(*axes, shape.sequences, 1),
        "label_index": torch.zeros(labels, dtype=torch.int64),
        "label_ids": torch.zeros(labels, dtype=torch.int64),
        "samples": CuSeqlens.of([lengths] * shape.sequences, shape.tokens),
        **images,
    }


def tensors_of(inputs: Mapping[str, object]) -> list[Tensor]:
    """The tensors among the inputs of a training module."""
    return [value for value in tree_leaves(dict(inputs)) if isinstance(value, Tensor)]


def _projected_images(config: ModelConfig, shape: SequenceShape, *, cached: bool) -> tuple[dict[str, Any], int]:
    """Return projected features of the largest images, with the pixels or cached features, and their image tokens."""
    from vlmpipe.trainer.models.hf.family import HfFamily
    from vlmpipe.trainer.models.hf.model import PROJECTED
    from vlmpipe.trainer.models.hf.processor import FEATURES

    images = image_form_of(config).published
    assert images is not None
    patches, in_patch = images.patches
    image_tokens = min(shape.images * images.max_tokens, shape.sequences * shape.tokens - shape.label_tokens)
    inputs = {PROJECTED: torch.zeros(image_tokens, images.hidden)}
    if cached:
        stored = HfFamily().stored_numbers(config)
        assert stored is not None, "checked by require_trainable"
        inputs[FEATURES] = torch.zeros(shape.images, stored, dtype=torch.bfloat16)
    else:
        inputs["pixel_values"] = torch.zeros(shape.images * patches, in_patch)
    return {"images": inputs}, image_tokens


def _square_images(config: ModelConfig, shape: SequenceShape, *, cached: bool) -> tuple[dict[str, Tensor], int]:
    """Inputs, and the number of image tokens."""
    family, side = family_of(config), config.image_size
    image_tokens = image_tokens_of(config)(side, side)
    if cached:
        images = torch.zeros(shape.images, *family.feature_shape(config), dtype=torch.bfloat16)
    else:
        images = torch.zeros(shape.images, 3, side, side)
    return {"images": images}, shape.images * image_tokens


def _images_of_any_shape(config: ModelConfig, shape: SequenceShape, *, cached: bool) -> tuple[dict[str, Any], int]:
    family, sizes = family_of(config), image_grids(config, shape)
    image_tokens = sum(rows * columns for rows, columns in sizes)
    if cached:
        (width,) = family.feature_shape(config)
        return {"images": torch.zeros(image_tokens, width, dtype=torch.bfloat16)}, image_tokens
    from vlmpipe.trainer.models.hf.grids import patch_numbers
    from vlmpipe.trainer.models.hf_native.pretrained import part_config

    grids = image_form_of(config).grids
    assert grids is not None
    patches = torch.zeros(image_tokens * grids.merge**2, patch_numbers(part_config(config.tower).vision_config))
    in_patches = [(1, rows * grids.merge, columns * grids.merge) for rows, columns in sizes]
    return {"images": patches, "image_grids": tuple(in_patches)}, image_tokens
