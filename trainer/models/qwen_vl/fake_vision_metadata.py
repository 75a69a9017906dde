"""Vision metadata of a Qwen-VL module on fake tensors, for traces.

Every tensor that is made in its stead has the size and the type of the library's own, so that what is counted stays.
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

TAPS = 4  # entries of the table of positions that one patch's is interpolated from


def tell_sizes(module: QwenVLM) -> None:
    """Have `module` run without looking at numbers.

    Attention inside windows is taken as one product over all patches: products of windows have the same inputs and
    outputs side by side, and thousands of them would take minutes to trace. FLOPs cannot be counted so.
    """
    module.sizes_of = _sizes


def _sizes(tower: nn.Module, grids: Sequence[Grid], device: torch.device) -> dict[str, Any]:
    """In the place of `trainer.models.qwen_vl.vision_metadata.sizes_of`.

    Lengths are no tensors: the library turns them into lists, which those without numbers cannot become.
    """
    patches = sum(map(math.prod, grids))
    lengths = np.array([0, patches])
    known: dict[str, Any] = {
        "position_ids": torch.zeros(patches, 2, dtype=torch.int64),
        "cu_seqlens": lengths,
    }
    if hasattr(tower, "window_size"):
        tokens = patches // int(tower.config.spatial_merge_size) ** 2
        known |= {"window_index": torch.zeros(tokens, dtype=torch.int64), "cu_window_seqlens": lengths}
    if hasattr(tower, "pos_embed"):
        known["interp_indices"] = torch.zeros(patches, TAPS, dtype=torch.int64)
        known["interp_weights"] = torch.zeros(patches, TAPS)
    return known
