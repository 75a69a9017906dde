"""Fill by sequence length is that of the sequences that a run trains on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.planner.sequence_fill import LengthFill, fill_by_length, length_advice
from vlmpipe.trainer.data.sampler import PackedBatchSampler


def config(*overrides: str) -> RunConfig:
    settings = {"train.global_batch_size": "16", "train.micro_batch_size": "8"}
    settings |= dict(one.split("=", 1) for one in overrides)
    return load_run_file(ROOT / "configs/easy-vqa.yaml", [f"{name}={value}" for name, value in settings.items()])


class Split(SimpleNamespace):
    """A `SplitIndex` of samples of one image each, in five shards."""

    def __init__(self, shortest: int, longest: int, samples: int = 600) -> None:
        tokens = np.random.default_rng(0).integers(shortest, longest + 1, samples)
        super().__init__(name="train", tokens=tokens, shard_numbers=np.arange(samples) % 5)

    def __len__(self) -> int:
        return len(self.tokens)

    def shown(self) -> Any:
        return np.ones(len(self), np.int64)


@pytest.mark.parametrize("overrides", [(), ("data.max_images_per_sequence=3",), ("data.shuffle_shards=2",)])
def test_the_fill_of_each_length_is_what_a_run_packs(overrides: tuple[str, ...]) -> None:
    data = Split(90, 280)
    found = fill_by_length(config(*overrides), data)
    assert [one.sequence_length for one in found] == [512, 1024, 2048, 4096]
    for one in found:
        changed = config(
            *overrides,
            f"data.sequence_length={one.sequence_length}",
            f"train.micro_batch_size={one.micro_batch_size}",
            f"train.global_batch_size={one.global_batch_size}",
        )
        train = changed.train
        sampler = PackedBatchSampler(data, changed.data, seed=train.seed, global_batch_size=train.global_batch_size)
        trained = sum(data.tokens[sampler.members(sampler.batch(step))].sum() for step in range(sampler.num_steps(1)))
        assert one.fill == trained / (sampler.num_sequences(0) * one.sequence_length)
        assert one.sequence_length * train.micro_batch_size == 512 * 8, "as many tokens in a micro-batch"
        assert one.sequence_length * train.global_batch_size == 512 * 16, "as many tokens in a step"


def test_shorter_sequences_hold_every_sample() -> None:
    found = fill_by_length(config(), Split(20, 129))
    assert found[0] == LengthFill(256, 16, 32, found[0].fill)


def test_without_packing_nothing_is_suggested() -> None:
    assert not fill_by_length(config("data.pack=false"), Split(90, 280))
    assert length_advice((), config()) == ""


def test_advice_names_the_fullest_and_of_equals_the_shortest() -> None:
    fills = (LengthFill(512, 8, 16, 0.928), LengthFill(1024, 4, 8, 0.98301), LengthFill(2048, 2, 4, 0.9833))
    assert "data.sequence_length=1024 train.micro_batch_size=4 train.global_batch_size=8" in length_advice(
        fills, config()
    )
    assert length_advice(fills[1:], config("data.sequence_length=1024")).endswith("1,024 98.3%, 2,048 98.3%.")
