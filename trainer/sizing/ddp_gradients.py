"""Sizes of what DDP sends of gradients: its buckets, and PowerSGD's factors. Imports no torch: the planner reads it."""

from __future__ import annotations

MIB = 2**20
TORCH_BUCKET_MIB, TORCH_FIRST_BUCKET_MIB = 25, 1  # torch's defaults
# The `bucket_cap_mb` that Vertex AI's documentation of the Reduction Server recommends; it applies to the first too.
REDUCERS_BUCKET_MIB = 64
MIN_COMPRESSION_RATE = 2  # torch's default


def bucket_cap_mib(*, reducers: bool) -> int | None:
    """DDP's bucket size; None is torch's default. reducers: a Reduction Server sums the gradients."""
    return REDUCERS_BUCKET_MIB if reducers else None


def bucket_bytes(*, reducers: bool) -> tuple[int, int]:
    """Sizes of the first bucket and of the others."""
    if reducers:
        return REDUCERS_BUCKET_MIB * MIB, REDUCERS_BUCKET_MIB * MIB
    return TORCH_FIRST_BUCKET_MIB * MIB, TORCH_BUCKET_MIB * MIB


def factors_rank(rows: int, columns: int, rank: int) -> int:
    """Rank of the two factors, rows x rank and columns x rank, that are sent for a matrix; 0 if it is sent itself.

    Factors are sent if they have less than half of its numbers (torch's powerSGD_hook.py, `_should_compress`); those of
    a vector never have. A tensor with more axes is a matrix with all but the first axis joined.
    """
    rank = min(rows, columns, rank)
    return rank if MIN_COMPRESSION_RATE * factors_numbers(rows, columns, rank) < rows * columns else 0


def factors_numbers(rows: int, columns: int, rank: int) -> int:
    """Numbers in both factors."""
    return (rows + columns) * rank
