"""Vision metadata of a Qwen-VL module on fake tensors, for traces.

Each tensor has the size and type of the library's own, so that traced bytes are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.models.image_inputs import Grid
from trainer.models.qwen_vl.model import QwenVLM

TAPS = 4  # entries of the position table that one patch's position is interpolated from


def use_fake_sizes(module: QwenVLM) -> None:
    """Have `module` run without reading values.

    Windowed attention then runs as one product over all patches. Its inputs and outputs have the same size, and
    products of thousands of windows would take minutes to trace; its FLOPs cannot be counted this way.
    """
    module.sizes_of = _fake_sizes


def _fake_sizes(tower: nn.Module, grids: Sequence[Grid], device: torch.device) -> dict[str, Any]:
    """Replaces `trainer.models.qwen_vl.vision_metadata.sizes_of`.

    Lengths are no tensors: the library converts them to lists, which fake tensors do not allow.
    """
    patches = sum(map(math.prod, grids))
    lengths = np.array([0, patches])
    sizes: dict[str, Any] = {"position_ids": torch.zeros(patches, 2, dtype=torch.int64), "cu_seqlens": lengths}
    if hasattr(tower, "window_size"):
        tokens = patches // int(tower.config.spatial_merge_size) ** 2
        sizes |= {"window_index": torch.zeros(tokens, dtype=torch.int64), "cu_window_seqlens": lengths}
    if hasattr(tower, "pos_embed"):
        sizes["interp_indices"] = torch.zeros(patches, TAPS, dtype=torch.int64)
        sizes["interp_weights"] = torch.zeros(patches, TAPS)
    return sizes
