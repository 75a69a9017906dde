"""Memory of DeepSpeed's stages 1 and 2."""

from __future__ import annotations

import pytest

from tests.support.planner.planned_memory import planned_phases
from tests.support.trainer.memory_cases import BF16, BF16_SUMS, Case


@pytest.mark.parametrize("changes", [BF16, BF16 | BF16_SUMS | {"train.offload": "optimizer"}], ids=["device", "host"])
def test_zero2_in_one_process_reduces_by_buckets_too(changes: dict[str, str]) -> None:
    """As measured on an H200: nothing is sharded there, but the stage is still 2."""
    phases = planned_phases(Case("zero2", changes), 1, on_gpu=True)
    parts = {part.name: part.bytes for part in phases["backward"]}
    assert parts["buckets"] > 0
    assert "whole gradients" not in parts
