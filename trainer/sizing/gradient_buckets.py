"""Bucket sizes of DDP's gradient all-reduce. Imports no torch: the planner reads it."""

from __future__ import annotations

MIB = 2**20
TORCH_BUCKET_MIB, TORCH_FIRST_BUCKET_MIB = 25, 1  # torch's defaults
# The `bucket_cap_mb` that Vertex AI's documentation of the Reduction Server recommends; it applies to the first too.
REDUCERS_BUCKET_MIB = 64


def bucket_cap_mib(*, reducers: bool) -> int | None:
    """DDP's bucket size; None is torch's default. reducers: a Reduction Server sums the gradients."""
    return REDUCERS_BUCKET_MIB if reducers else None


def bucket_bytes(*, reducers: bool) -> tuple[int, int]:
    """Sizes of the first bucket and of the others."""
    if reducers:
        return REDUCERS_BUCKET_MIB * MIB, REDUCERS_BUCKET_MIB * MIB
    return TORCH_FIRST_BUCKET_MIB * MIB, TORCH_BUCKET_MIB * MIB
