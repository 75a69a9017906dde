"""Images of one forward pass: pixel values or cached features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Grid = tuple[int, int, int]  # of an image or a video: patches in time (1 of an image), rows and columns of patches


NamedImages = Mapping[str, Tensor | tuple[int, ...]]  # inputs of a model of family hf by name; numbers are a shape


class Images(NamedTuple):
    """values: one entry for each image, in families that resize them to one square; otherwise the patches or
    tokens of all images, concatenated. Of family hf inputs by name (see `HfVLM.forward`), none without images."""

    values: Tensor | NamedImages
    grids: tuple[Grid, ...] | None = None  # of pixel values that are patches; stays on the host

    def to(self, device: torch.device) -> Images:
        """On the device, without a wait where they are pinned."""
        return self._mapped(lambda value: value.to(device, non_blocking=True))

    def pinned(self) -> Images:
        """Return a copy in page-locked memory."""
        return self._mapped(torch.Tensor.pin_memory)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Images:
        if isinstance(self.values, Tensor):
            return self._replace(values=function(self.values))
        named = self.values.items()
        return self._replace(
            values={name: function(value) if isinstance(value, Tensor) else value for name, value in named}
        )


# (encoded images, how many of them each sample has) -> their pixel values. Without the latter, each is a sample.
PrepareImages = Callable[..., Images]


def join_features(features: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Features of several images as one tensor. shape: the family's `feature_shape`, (tokens, width) of an image,
    or (width,) if images differ in tokens."""
    if not features:
        return torch.empty(0, *shape, dtype=torch.bfloat16)
    return torch.cat(list(features)).view(-1, *shape)
