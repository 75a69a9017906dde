"""DeepSpeed's configuration is derived from the run file, and takes what the run file does not decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.trainer_runs import losses, make_run, train_runs
from trainer.train_config import DECIDED_HERE, TrainConfig

# ZeRO++ (Wang et al. 2023, arXiv 2306.10209): a second copy of the weights' slices in each node.
HPZ = {"zero_optimization": {"zero_hpz_partition_size": 2, "overlap_comm": True}, "wall_clock_breakdown": True}


def test_hpz_on_two_nodes_of_two_equals_one_process_and_the_file_says_what_was_used(tmp_path: Path) -> None:
    common = {"train.max_steps": 4, "features.cache": "off"}
    reference = make_run(tmp_path, "reference", common, features="off")
    zero = common | {"train.strategy": "zero3", "train.micro_batch_rows": 1}
    given, plain = (
        make_run(tmp_path, name, zero | {"train.deepspeed": content}, features="off")
        for name, content in (("hpz", HPZ), ("plain", {}))
    )
    train_runs([reference], processes=1)
    train_runs([given, plain], processes=2, nodes=2)
    for job in (given, plain):
        assert losses(job) == pytest.approx(losses(reference), rel=1e-5)
    with_it, without = (json.loads(Path(job.run.run_uri, "deepspeed.json").read_text()) for job in (given, plain))
    assert with_it.pop("wall_clock_breakdown") and not without.pop("wall_clock_breakdown")
    zero_with, zero_without = with_it.pop("zero_optimization"), without.pop("zero_optimization")
    assert with_it == without and zero_with == zero_without | HPZ["zero_optimization"]  # type: ignore[operator]
    assert (without["train_batch_size"], zero_without["stage"]) == (8, 3)


def settings(strategy: str, deepspeed: dict[str, Any]) -> TrainConfig:
    optimizer = {"learning_rate": 1e-3}
    return TrainConfig.model_validate(
        {"global_batch_rows": 2, "optimizer": optimizer, "strategy": strategy, "deepspeed": deepspeed}
    )


@pytest.mark.parametrize("key", DECIDED_HERE)
def test_what_the_run_file_decides_is_refused_with_the_field_that_does(key: str) -> None:
    outer, _, inner = key.partition(".")
    with pytest.raises(ValidationError) as caught:
        settings("zero2", {outer: {inner: 1} if inner else 1})
    assert f"deepspeed.{key} is decided by {DECIDED_HERE[key]}" in str(caught.value)


def test_it_is_for_deepspeed_alone() -> None:
    assert settings("zero1", {"wall_clock_breakdown": True}).deepspeed
    with pytest.raises(ValidationError, match="deepspeed has no meaning for strategy fsdp"):
        settings("fsdp", {"wall_clock_breakdown": True})
    with pytest.raises(ValidationError, match="found 3, expected a mapping"):
        settings("zero1", {"zero_optimization": 3})
