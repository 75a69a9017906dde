"""Bucket sizes of DDP's gradient all-reduce. No torch here: planners read it."""

from __future__ import annotations

MIB = 2**20
TORCH_BUCKET_MIB, TORCH_FIRST_BUCKET_MIB = 25, 1  # torch's own, as long as nothing is asked for
# Vertex AI's documentation of the Reduction Server recommends this `bucket_cap_mb`; then the first one is no smaller.
REDUCERS_BUCKET_MIB = 64


def bucket_cap_mib(*, reducers: bool) -> int | None:
    """What to ask DDP for; None leaves torch's own. `reducers`: a Reduction Server sums the gradients."""
    return REDUCERS_BUCKET_MIB if reducers else None


def bucket_bytes(*, reducers: bool) -> tuple[int, int]:
    """Of the first bucket, which has the gradients that come first, and of the others."""
    if reducers:
        return REDUCERS_BUCKET_MIB * MIB, REDUCERS_BUCKET_MIB * MIB
    return TORCH_FIRST_BUCKET_MIB * MIB, TORCH_BUCKET_MIB * MIB
