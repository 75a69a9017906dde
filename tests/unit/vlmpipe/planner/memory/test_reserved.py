"""Memory that torch reserves beside what is in use; test_published_runs.py holds it to published figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.planner.configs import LLAVA_7B, run_config
from vlmpipe.planner.memory.components import MemoryPart
from vlmpipe.planner.memory.rank import Memory
from vlmpipe.planner.memory.reserved import TURN, idle_parts
from vlmpipe.planner.parallel_layout import layout_of

GRADIENTS = MemoryPart("gradients", 1)


def idle(*held: MemoryPart, moment: str = TURN, **run: Any) -> dict[str, int]:
    config = run_config(**{"train__precision": "bf16", **run})
    return {part.name: part.bytes for part in idle_parts(config, LLAVA_7B, layout_of(config), moment, held)}


def test_only_fsdp_keeps_pools_and_only_a_loss_that_is_fullest_leaves_a_hole() -> None:
    assert set(idle(train__strategy="fsdp")) == {"gathering", "reduced gradients", "bf16 logits"}
    assert set(idle(train__strategy="zero2")) == {"bf16 logits"}
    assert not idle(train__strategy="zero2", moment="step")
    assert not idle(train__strategy="zero2", train__precision="fp32")


def test_gradients_that_are_there_are_not_counted_twice_and_more_ranks_keep_fewer() -> None:
    one, summed = idle(train__strategy="fsdp"), idle(GRADIENTS, train__strategy="fsdp")
    many = idle(train__strategy="fsdp", cluster__replica_count=4, train__global_batch_size=128)
    assert summed["reduced gradients"] < one["reduced gradients"]
    assert many["reduced gradients"] == pytest.approx(one["reduced gradients"] / 4, rel=0.01)
    assert many["gathering"] < one["gathering"]


def test_the_hole_is_as_large_as_the_logits_of_a_chunk() -> None:
    whole, chunk = (idle(train__strategy="ddp", train__loss_chunk_tokens=tokens) for tokens in (0, 1024))
    assert chunk["bf16 logits"] == 2 * 1024 * LLAVA_7B.vocabulary
    assert whole["bf16 logits"] > chunk["bf16 logits"]


def test_the_margin_may_be_kept_but_no_more() -> None:
    parts = MemoryPart("weights", 90), MemoryPart("fragmentation", 5)
    memory = Memory("GPU", 100, parts, TURN, idle=(MemoryPart("gathering", 10),))
    assert not memory.returns_memory and memory.reserved_bytes == 100
    assert replace(memory, idle=(MemoryPart("gathering", 11),)).returns_memory
