"""The mask that keeps packed samples apart, made on the device without a look at its numbers.

transformers makes the same mask from positions that restart. First it asks whether any row holds more than one sample,
and the host then waits until the device has done all that it was given. The host knows that from the rows themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mask_of(config: Any, position_ids: Tensor, *, packed: bool) -> Tensor | None:
    """(rows, 1, tokens, tokens), true where a token sees another: one before it, or itself, of the same sample.

    config: the language model's. position_ids: (rows, tokens), restarting for each sample. None leaves it to
    transformers: rows of one sample each need no mask, and other kinds of attention take other forms of it.
    """
    if not packed or not _takes_mask(config):
        return None
    starts = position_ids.diff(prepend=position_ids[:, :1] - 1) != 1
    sample = starts.cumsum(-1)
    places = torch.arange(position_ids.shape[1], device=position_ids.device)
    return ((sample[:, :, None] == sample[:, None, :]) & (places[:, None] >= places)).unsqueeze(1)


def _takes_mask(config: Any) -> bool:
    """Whether all layers see all that comes before, by torch's own attention."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = kinds != {"full_attention"} or getattr(config, "sliding_window", None)
    both_ways = getattr(config, "use_bidirectional_attention", False)
    return config._attn_implementation == "sdpa" and not windowed and not both_ways
