"""Vision metadata of a tower that takes a grid of patches for each image, computed on the host from image sizes.

The library would derive it from a tensor on the device, and the host would wait for that in each layer. Here the
library's own functions compute it from the host's numbers, and the tower takes the results as named arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from vlmpipe.trainer.models.hf.vision_attention import Pieces
from vlmpipe.trainer.models.image_inputs import Grid

TAPS = 4  # entries of the position table that one patch's position is interpolated from


def sizes_of(tower: nn.Module, grids: Sequence[Grid], device: torch.device) -> dict[str, object]:
    """Named arguments of the tower's forward pass for at least one image.

    The pieces that attention keeps apart are known to the host, see `vlmpipe.trainer.models.hf.vision_attention`.
    """
    merge, on_host = int(tower.spatial_merge_size), torch.tensor(grids)
    tensors = {"position_ids": get_vision_position_ids(on_host, merge)}
    lengths = {"seqlen": get_vision_cu_seqlens(on_host)}
    if hasattr(tower, "window_size"):
        tensors["window_index"], lengths["window_seqlen"] = get_vision_window_index(
            on_host, merge, tower.window_size, tower.patch_size
        )
    if hasattr(tower, "pos_embed"):
        tensors["interp_indices"], tensors["interp_weights"] = get_vision_interpolation_indices_and_weights(
            on_host,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
    return {name: _moved(tensor, device) for name, tensor in tensors.items()} | _kept_apart(
        {name: Pieces.of(ends.tolist(), device) for name, ends in lengths.items()}
    )


def fake_sizes_of(tower: nn.Module, grids: Sequence[Grid], device: torch.device) -> dict[str, object]:
    """Return `sizes_of` for traces: tensors of equal sizes and types, without values.

    Windowed attention then runs as one product over all patches. Its inputs and outputs have the same size; its FLOPs
    cannot be counted this way.
    """
    patches = sum(map(math.prod, grids))
    whole = Pieces(((0, patches, 1),), torch.empty(0, dtype=torch.int32), patches)
    sizes: dict[str, object] = {"position_ids": torch.zeros(patches, 2, dtype=torch.int64)} | _kept_apart(
        {"seqlen": whole}
    )
    if hasattr(tower, "window_size"):
        tokens = patches // int(tower.config.spatial_merge_size) ** 2
        sizes |= {"window_index": torch.zeros(tokens, dtype=torch.int64)} | _kept_apart({"window_seqlen": whole})
    if hasattr(tower, "pos_embed"):
        sizes["interp_indices"] = torch.zeros(patches, TAPS, dtype=torch.int64)
        sizes["interp_weights"] = torch.zeros(patches, TAPS)
    return sizes


def _kept_apart(pieces: dict[str, Pieces]) -> dict[str, object]:
    """The library's names of arguments for pieces, whose cumulative lengths it hands on as they are."""
    return {f"cu_{name}s": own for name, own in pieces.items()} | {
        f"max_{name}": own.longest for name, own in pieces.items()
    }


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting: from memory that is not page-locked, the host would wait for all queued work."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
