"""Images of one forward pass: pixel values or cached features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

Grid = tuple[int, int, int]  # of an image: 1, rows and columns of patches


class Images(NamedTuple):
    """Of a family whose images are all resized to one square, one entry of `values` is an image, or a tile of one that
    is cut; of another family, `values` are the patches or tokens of all images, one image after another."""

    values: Tensor
    grids: tuple[Grid, ...] | None = None  # where pixel values need it; numbers of the host, which stay there
    tiles: tuple[int, ...] | None = None  # of each image, where images are cut

    def to(self, device: torch.device) -> Images:
        return self._replace(values=self.values.to(device))

    def features_of_each(self, encoded: Sequence[Tensor] | Tensor) -> list[Tensor]:
        """(tokens, width) of each image, from what a family's `encode` makes of `values`."""
        if self.tiles is None:
            return list(encoded)
        left = iter(encoded)
        return [torch.cat(list(islice(left, count))) for count in self.tiles]


PrepareImages = Callable[[Sequence[bytes]], Images]  # encoded images -> their pixel values


def join_features(features: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Features of several images as one tensor. `shape` is the family's `feature_shape`: (tokens, width) of an image or
    of a tile, or (width,) where images differ in tokens."""
    if not features:
        return torch.empty(0, *shape, dtype=torch.bfloat16)
    return torch.cat(list(features)).view(-1, *shape)
