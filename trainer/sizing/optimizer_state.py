"""Parameters with 8-bit moments under `train.optimizer.name` adamw_8bit, and the bytes of these moments."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCK = 256  # numbers of a row that share a scale
SMALLEST = 4096  # numbers; smaller tensors gain nothing
BYTES_8_BIT = 2 * (1 + 4 / BLOCK)  # of both moments, a parameter: codes, and an fp32 scale a block


def fits_8_bits(name: str, shape: Sequence[int]) -> bool:
    """Return whether the moments of a parameter of this name and shape are stored in 8 bits.

    Embedding and head keep fp32: rows of rare and of frequent tokens would share a scale.
    """
    is_matrix = len(shape) >= 2 and shape[-1] % BLOCK == 0 and math.prod(shape) >= SMALLEST
    return is_matrix and "embed_tokens." not in name and "lm_head." not in name
