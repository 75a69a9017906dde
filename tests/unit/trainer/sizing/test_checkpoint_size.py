"""Disk that checkpoints take of a node."""

from __future__ import annotations

from typing import Any

import pytest

from vlmpipe.trainer.config.optimizer import OptimizerConfig
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.sizing.checkpoint_size import node_bytes


@pytest.mark.parametrize(
    ("strategy", "in_a_bucket"),
    [
        ("fsdp", 300),  # a node's ranks load what they save
        ("zero3", 300),
        ("ddp", 1200),  # every node holds all
        ("hsdp", 1200),
        ("zero1", 300),
        ("zero2", 300),
    ],
)
def test_a_node_has_room_for_the_larger_of_a_save_and_a_resume(strategy: Any, in_a_bucket: int) -> None:
    rates = OptimizerConfig(learning_rate=1e-3)
    settings = TrainConfig(global_batch_size=8, optimizer=rates, strategy=strategy, precision="fp32")
    folder, bucket = (node_bytes(100, settings, nodes=4, in_bucket=in_bucket) for in_bucket in (False, True))
    assert folder == 300, "a folder is read where it is"
    assert bucket == in_a_bucket
