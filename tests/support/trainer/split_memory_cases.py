"""Memory cases on four processes: models split by tensor parallelism, and weights shared within nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.support.trainer.memory_cases import (
    ADAPTERS,
    BF16,
    CHECKPOINTING,
    IN_CHUNKS,
    IN_FRONT,
    IN_HOST,
    LARGE_VOCABULARY,
    ONLINE,
    PROJECTOR,
    SELECTIVE,
    TOWER_TRAINED,
    Case,
)

NODE_WEIGHTS: dict[str, Any] = {"train.deepspeed": {"zero_optimization": {"zero_hpz_partition_size": 2}}}
# On four processes, two on each of two nodes.
HYBRID_CASES = {
    **{
        f"zero3 node weights{suffix}": Case("zero3", NODE_WEIGHTS | changes, cached="off" not in changes.values())
        for suffix, changes in {
            "": {},
            " online": ONLINE,
            " bf16": BF16,
            " checkpointing": CHECKPOINTING,
            " adapters": ADAPTERS,
            " projector only": PROJECTOR,
            " offload": {"train.offload": "optimizer+weights"},
            " tower trained": TOWER_TRAINED,
        }.items()
    },
    "zero3 node weights one pass": Case("zero3", NODE_WEIGHTS, passes=1),
    "hsdp": Case("hsdp"),
    "hsdp bf16 one pass": Case("hsdp", BF16, passes=1),
    "hsdp checkpointing": Case("hsdp", CHECKPOINTING),
    "hsdp offload": Case("hsdp", {"train.offload": "optimizer+weights"}),
    "hsdp offload bf16 one pass": Case("hsdp", {"train.offload": "optimizer+weights", **BF16}, passes=1),
    "hsdp online": Case("hsdp", ONLINE, cached=False),
    "hsdp tower trained": Case("hsdp", TOWER_TRAINED, cached=False),
    "hsdp projector only": Case("hsdp", PROJECTOR),
    "hsdp adapters": Case("hsdp", ADAPTERS),
    "hsdp adapters bf16": Case("hsdp", ADAPTERS | BF16),
    "hsdp adapters offload": Case("hsdp", ADAPTERS | {"train.offload": "optimizer+weights"}),
}
SHARED_TOKENS: dict[str, Any] = {"train.sequence_parallel": True}
# On four processes: two copies of the model on two ranks each.
SPLIT_CASES = {
    "tp loss in chunks": Case("tp", IN_CHUNKS, vocabulary=LARGE_VOCABULARY),
    "tp": Case("tp"),
    "tp bf16 one pass": Case("tp", {"train.precision": "bf16"}, passes=1),
    "tp checkpointing": Case("tp", {"train.activation_checkpointing": "full"}),
    "tp frozen in front": Case("tp", IN_FRONT),
    "tp frozen in front bf16": Case("tp", IN_FRONT | BF16),
    "tp projector only": Case("tp", {"model.freeze": ["tower", "language_model"]}),
    "tp tower trained": Case("tp", TOWER_TRAINED, cached=False),
    "tp online": Case("tp", ONLINE, cached=False),
    "tp shared tokens": Case("tp", SHARED_TOKENS),
    "tp shared tokens checkpointing": Case("tp", SHARED_TOKENS | CHECKPOINTING),
    "tp shared tokens bf16": Case("tp", SHARED_TOKENS | BF16),
    "tp shared tokens adapters": Case("tp", SHARED_TOKENS | ADAPTERS),
    "tp shared tokens bf16 checkpointing": Case("tp", SHARED_TOKENS | BF16 | CHECKPOINTING),
    "tp selective": Case("tp", SELECTIVE),
    "tp bf16 selective": Case("tp", SELECTIVE | BF16),
    "tp adapters selective": Case("tp", SELECTIVE | ADAPTERS),
    "tp shared tokens selective": Case("tp", SELECTIVE | SHARED_TOKENS),
    "tp shared tokens bf16 selective": Case("tp", SELECTIVE | SHARED_TOKENS | BF16),
    "tp shared tokens adapters selective": Case("tp", SELECTIVE | SHARED_TOKENS | ADAPTERS),
    "tp shared tokens activations offloaded": Case("tp", IN_HOST | SHARED_TOKENS),
    "tp adapters": Case("tp", ADAPTERS),
    "tp adapters bf16": Case("tp", ADAPTERS | BF16),
    "tp adapters checkpointing": Case("tp", ADAPTERS | CHECKPOINTING),
    "tp bf16": Case("tp", BF16),
    "tp bf16 checkpointing": Case("tp", BF16 | CHECKPOINTING),
}
SPLIT_CASES |= {
    f"{family} {name}": replace(case, family=family)
    for family in ("qwen2_5_vl", "qwen3_vl")
    for name, case in {
        "tp tower trained": Case("tp", TOWER_TRAINED, cached=False),
        "tp bf16 online": Case("tp", ONLINE | BF16, cached=False),
        "tp adapters": Case("tp", ADAPTERS),
        "tp shared tokens bf16 checkpointing": Case("tp", SHARED_TOKENS | BF16 | CHECKPOINTING),
        "tp shared tokens bf16 online": Case("tp", SHARED_TOKENS | BF16 | ONLINE, cached=False),
    }.items()
}
