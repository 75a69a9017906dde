"""A Qwen-VL training module on tensors without numbers: what the library reads off grids and masks is told to it.

Every tensor that is made in its stead has the size and the type of the library's own, so that what is counted stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.models.qwen_row import QwenRowModel

TAPS = 4  # entries of the table of positions that one patch's is interpolated from


def tell_sizes(module: QwenRowModel, image_tokens: Sequence[int]) -> None:
    """Have `module` run without looking at numbers, on images of so many tokens each.

    Attention inside windows is taken as one product over all patches: products of windows have the same inputs and
    outputs side by side, and thousands of them would take minutes to trace. FLOPs cannot be counted so.
    """
    visual, language_model = module.model.model.visual, module.model.model.language_model
    patches = max(1, sum(image_tokens)) * int(visual.config.spatial_merge_size) ** 2  # without images, a blank one
    for tower in module._tower:
        tower.register_forward_pre_hook(
            lambda _, args, named: (args, named | _known(visual, patches)), with_kwargs=True
        )
    if hasattr(language_model, "_deepstack_process"):
        tokens = torch.zeros(sum(image_tokens), dtype=torch.int64)
        language_model._deepstack_process = lambda hidden, mask, level: _add_level(hidden, tokens, level)


def _known(visual: nn.Module, patches: int) -> dict[str, Any]:
    """What transformers 5.23 works out of the grids of images, by the names under which it takes it made before.

    Lengths are no tensors: the library turns them into lists, which those without numbers cannot become.
    """
    lengths = np.array([0, patches])
    known: dict[str, Any] = {
        "position_ids": torch.zeros(patches, 2, dtype=torch.int64),
        "cu_seqlens": lengths,
    }
    if hasattr(visual, "window_size"):
        tokens = patches // int(visual.config.spatial_merge_size) ** 2
        known |= {"window_index": torch.zeros(tokens, dtype=torch.int64), "cu_window_seqlens": lengths}
    if hasattr(visual, "pos_embed"):
        known["interp_indices"] = torch.zeros(patches, TAPS, dtype=torch.int64)
        known["interp_weights"] = torch.zeros(patches, TAPS)
    return known


def _add_level(hidden: Tensor, tokens: Tensor, level: Tensor) -> Tensor:
    """The library's `_deepstack_process`, with the places of image tokens known instead of found by a mask.

    hidden: (rows, tokens, hidden). tokens: (image tokens,). level: (image tokens, hidden).
    """
    hidden = hidden.clone()
    hidden[tokens, tokens] = hidden[tokens, tokens] + level.to(hidden.dtype)
    return hidden
