"""Reading, preparing, encoding and writing features overlap, and nothing of them is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.feature_cache import encode
from vlmpipe.trainer.feature_cache.encode import OwnShards, ShardWriter, encode_batches, node_sha256, one_behind
from vlmpipe.trainer.models.image_inputs import Images

CPU = torch.device("cpu")
WAIT_S = 20.0
BATCHES = [["a", "b"], ["c"], ["d", "e"], ["f"]]


class Stages:
    """Reading, preparing and encoding. Encoding a batch waits for the preparation of the `waits_for`-th after it."""

    def __init__(self, waits_for: int = 0) -> None:
        self.waits_for, self.read_images, self.prepared, self.encoded = waits_for, list[str](), 0, 0
        self.changed = threading.Condition()

    def read(self, image: str) -> bytes:
        with self.changed:
            self.read_images.append(image)
            self.changed.notify_all()
        return image.encode()

    def prepare(self, images: Sequence[bytes]) -> Images:
        with self.changed:
            self.prepared += 1
            self.changed.notify_all()
        return Images(torch.tensor([[float(data[0])] for data in images]))

    def encode(self, _config: Any, _tower: nn.Module, values: Tensor, _grids: Any, _dtype: torch.dtype) -> Tensor:
        self.encoded += 1
        if self.encoded < len(BATCHES):
            with self.changed:
                assert self.changed.wait_for(lambda: self.prepared >= self.encoded + self.waits_for, WAIT_S)
        return values * 2


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    stages = Stages()
    monkeypatch.setattr(encode, "image_preparer", lambda config: stages.prepare)
    monkeypatch.setattr(encode, "family_of", lambda config: stages)
    return stages


def encoded(stages: Stages) -> Iterator[dict[str, Tensor]]:
    job: Any = type("Job", (), {"model": None})()
    return encode_batches(job, nn.Identity(), BATCHES, stages.read, CPU)


def test_every_image_gets_its_features_in_order(stages: Stages) -> None:
    found = [{name: float(value) for name, value in batch.items()} for batch in encoded(stages)]
    assert found == [{name: 2.0 * ord(name) for name in batch} for batch in BATCHES]


def test_the_next_batch_is_prepared_while_one_is_encoded(stages: Stages) -> None:
    """Encoding waits for that here, so one after the other would not end."""
    stages.waits_for = 1
    assert len(list(encoded(stages))) == len(BATCHES)


def test_an_image_that_cannot_be_read_ends_it(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(image: str) -> bytes:
        if image == "d":
            raise UserError("shard 3 is damaged")
        return image.encode()

    monkeypatch.setattr(stages, "read", read)
    found = []
    with pytest.raises(UserError, match="shard 3 is damaged"):
        for batch in encoded(stages):
            found += batch
    assert found in ([], ["a", "b"], ["a", "b", "c"])  # the first error in time, others were under way


def test_a_batch_comes_once_the_next_is_under_way() -> None:
    begun = []

    def begin() -> Iterator[int]:
        for number in range(3):
            begun.append(number)
            yield number

    seen = [(number, len(begun)) for number in one_behind(begin())]
    assert seen == [(0, 2), (1, 3), (2, 3)]
    assert list(one_behind([])) == []


def test_a_shard_is_written_while_the_next_is_encoded() -> None:
    written, may_write = list[str](), threading.Event()

    def write(features: dict[str, Tensor]) -> None:
        assert may_write.wait(WAIT_S)
        written.extend(features)

    with ShardWriter(write) as writer:
        writer.submit({"a": torch.ones(1)})
        assert written == []  # and here the next shard is encoded
        may_write.set()
        writer.submit({"b": torch.ones(1)})
        assert written[:1] == ["a"]
    assert written == ["a", "b"]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_shard_that_cannot_be_written_ends_the_job(shards: int) -> None:
    def write(_features: dict[str, Tensor]) -> None:
        raise UserError("no permission for the bucket", code=ExitCode.NO_PERMISSION)

    with pytest.raises(UserError, match="no permission"), ShardWriter(write) as writer:
        for _ in range(shards):
            writer.submit({})


def test_the_first_rank_of_each_node_hashes_the_tower_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two ranks, whose files differ: the second's ranks see that their own were changed."""
    hashed: list[int] = []

    def of_rank(rank: int, everyone: list[str]) -> str:
        monkeypatch.setattr(encode, "weights_sha256", lambda tower: hashed.append(rank) or f"files of node {rank // 2}")
        monkeypatch.setattr(encode, "together", lambda worker, doing, action: action())
        monkeypatch.setattr(encode, "gather", lambda value, worker: everyone if everyone else [value])
        return node_sha256(nn.Identity(), ProcessContext(rank, 4, rank % 2, 2, CPU))

    gathered = ["files of node 0", "", "files of node 1", ""]
    assert [of_rank(rank, gathered) for rank in range(4)] == [f"files of node {rank // 2}" for rank in range(4)]
    assert hashed == [0, 2]


def test_a_rank_takes_its_shards_that_are_not_there() -> None:
    shards = [[str(number)] for number in range(6)]
    there = {f"{encode.shard_name(shards[3])}.json"}
    store: Any = type("Store", (), {"stat": lambda self, name: name if name in there else None})()
    rank = OwnShards(shards, ProcessContext(1, 2, 1, 2, CPU), store)
    assert list(rank.begin()) == [["1"], ["5"]]
    of_lost = OwnShards(
        shards, ProcessContext(1, 2, 1, 2, CPU), store, lost=[f"{encode.shard_name(shards[3])}.safetensors"]
    )
    assert list(of_lost.begin()) == [["1"], ["3"], ["5"]], "a sidecar without its shard is not a shard"
    assert list(rank.begun) == [(1, ["1"]), (5, ["5"])]
