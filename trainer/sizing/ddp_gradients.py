"""Sizes of DDP's buckets of gradients. Imports no torch: the planner reads it."""

from __future__ import annotations

# The `bucket_cap_mb` that Vertex AI's documentation of the Reduction Server recommends; it applies to the first too.
REDUCERS_BUCKET_MIB = 64


def bucket_cap_mib(*, reducers: bool) -> int | None:
    """DDP's bucket size; None is torch's default. reducers: a Reduction Server sums the gradients."""
    return REDUCERS_BUCKET_MIB if reducers else None
