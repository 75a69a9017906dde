"""Number types that have no effect or do not work are refused, with the nearest setting that works."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from vlmpipe.trainer.config.train import TrainConfig

OFFLOADED = {"offload": "optimizer"}


def train(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({"global_batch_size": 8, "optimizer": {"learning_rate": 1e-3}} | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategy": "fsdp", "precision": "bf16-autocast"}, "gathers weights in bf16: use bf16"),
        ({"strategy": "ddp", "shard_frozen_weights": True}, "use one of fsdp, hsdp, or zero3"),
        ({"strategy": "fsdp", "gradient_accumulation_dtype": "bf16"}, "use one of zero1, zero2, zero3, or fp32"),
        ({"reduce_dtype": "bf16", "precision": "fp32"}, "not apply to precision fp32: set precision bf16 too"),
        (
            {"reduce_dtype": "bf16", "strategy": "pp", "pipeline_parallel": 2},
            "does not work with strategy pp: use one of",
        ),
        (
            {"router_loss": 0.1, "strategy": "pp", "pipeline_parallel": 2},
            "does not work with strategy pp, where no rank",
        ),
        ({"router_loss": 0.1, "strategy": "fsdp", "context_parallel": 2}, "does not work with context_parallel, where"),
        ({"strategy": "zero2", **OFFLOADED}, "use zero3, or set gradient_accumulation_dtype to bf16"),
        ({"gradient_compression": "bf16"}, "use precision bf16-autocast, or set reduce_dtype to bf16"),
        ({"strategy": "zero2", "deepspeed": {"bf16": {"enabled": False}}}, "decided by train.precision"),
        ({"strategy": "zero2", "deepspeed": {"communication_data_type": "fp16"}}, "decided by train.reduce_dtype"),
    ],
)
def test_it_is_refused_with_what_works(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        train(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "fsdp"},
        {"reduce_dtype": "bf16"},
        {"strategy": "zero2", "gradient_accumulation_dtype": "bf16", **OFFLOADED},
        {"strategy": "zero2", "precision": "bf16-autocast", **OFFLOADED},
        {"strategy": "zero3", **OFFLOADED},
        {"gradient_compression": "bf16", "precision": "bf16-autocast"},
    ],
)
def test_what_is_named_in_its_place_is_taken(changes: dict[str, Any]) -> None:
    assert train(**changes).compute_type == "bf16"


@pytest.mark.parametrize(("strategy", "stored"), [("zero2", True), ("ddp", True), ("fsdp", True), ("pp", True)])
def test_weights_rest_in_bf16(strategy: str, stored: bool) -> None:
    stages = {"pipeline_parallel": 2} if strategy == "pp" else {}
    assert train(strategy=strategy, **stages).has_bf16_weights == stored
    assert not train(strategy="ddp", precision="bf16-autocast").has_bf16_weights
