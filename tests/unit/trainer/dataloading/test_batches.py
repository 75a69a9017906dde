"""Micro-batches: what collation keeps, and the background thread that makes them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.fakes.cuda import CudaDevices
from vlmpipe.trainer.data.chat.encode import IGNORED
from vlmpipe.trainer.data.loader import PackedSequence
from vlmpipe.trainer.data.sampler import GlobalBatch
from vlmpipe.trainer.dataloading.batches import PrefetchingLoader, StepBatches, collate
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.image_inputs import Images

ROW_TOKENS = 8


def row(labels: list[int], images: int = 0) -> PackedSequence:
    ids = np.arange(ROW_TOKENS, dtype=np.int64)
    return PackedSequence(
        input_ids=ids,
        labels=np.array(labels, dtype=np.int64),
        position_ids=ids,
        image_sha256=tuple(f"image{number}" for number in range(images)),
        image_sizes=((8, 8),) * images,
        image_token_counts=(1,) * images,
        tiles=images,
        sample_images=(images,),
        images=(),
        sample_ids=("sample",),
        sample_tokens=(ROW_TOKENS,),
        label_tokens=sum(label != IGNORED for label in labels),
    )


def no_images(rows: Sequence[PackedSequence]) -> Images:
    return Images(torch.empty(sum(len(each.image_sha256) for each in rows), 1, 4))


class Loader:
    """Stands in for PackedLoader: three sequences per step, and an error at one step if wanted."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at, self.asked, self.sampler = fails_at, [], Sampler()

    def sequences_for_step(self, step: int, rank: int, world_size: int) -> list[PackedSequence]:
        self.asked.append(step)
        if step == self.fails_at:
            raise DataError("this step cannot be read")
        return [row([IGNORED] * 4 + [4, 5, IGNORED, 7]), row([IGNORED] * ROW_TOKENS), row([IGNORED, 1] + [IGNORED] * 6)]


class Sampler:
    """Stands in for PackedBatchSampler: one epoch of batches with four label tokens each."""

    def batch(self, step: int) -> GlobalBatch:
        return GlobalBatch(epoch=0, start=3 * step, stop=3 * step + 3, sequences_consumed=3 * step)

    def label_tokens(self, batch: GlobalBatch) -> int:
        return 4

    def loss_terms(self, batch: GlobalBatch) -> int:
        return self.label_tokens(batch)


def stream(loader: Loader, end_step: int, first_step: int = 0, device: str = "cpu") -> PrefetchingLoader:
    return PrefetchingLoader(
        loader,  # type: ignore[arg-type]
        no_images,
        micro_batch_size=2,
        first_step=first_step,
        end_step=end_step,
        replica=DataParallelRank(index=0, count=1, leads=True, takes_images=True),
        device=torch.device(device),
    )


def test_a_label_is_predicted_from_the_token_before_it() -> None:
    batch = collate([row([IGNORED] * 4 + [4, 5, IGNORED, 7]), row([IGNORED, 1] + [IGNORED] * 6)], no_images)
    assert batch.label_index.tolist() == [3, 4, 6, ROW_TOKENS]
    assert batch.label_ids.tolist() == [4, 5, 7, 1]


def test_parts_of_a_batch_have_each_label_once() -> None:
    rows = [row([IGNORED] * 4 + [4, 5, IGNORED, 7]), row([IGNORED, 1] + [IGNORED] * 6)]
    whole, size = collate(rows, no_images), 2 * ROW_TOKENS // 4
    parts = [collate(rows, no_images, part=part, parts=4) for part in range(4)]
    found = torch.cat([batch.label_index + part * size for part, batch in enumerate(parts)])
    assert found.tolist() == whole.label_index.tolist()
    assert torch.cat([batch.label_ids for batch in parts]).tolist() == whole.label_ids.tolist()
    assert all(torch.equal(batch.input_ids, whole.input_ids) for batch in parts)


def test_steps_come_in_order_and_in_micro_batches() -> None:
    steps: list[StepBatches] = list(stream(Loader(), end_step=5, first_step=2))
    assert [data.step for data in steps] == [2, 3, 4]
    assert [len(batch.input_ids) for batch in steps[0].batches] == [2, 1]
    assert steps[0].slot_tokens == 3 * ROW_TOKENS


def test_an_error_of_the_thread_reaches_the_loop() -> None:
    seen = []
    with pytest.raises(DataError, match="cannot be read"):
        for data in stream(Loader(fails_at=2), end_step=9):
            seen.append(data.step)
    assert seen == [0, 1]


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_always_ends_the_thread(taken: int) -> None:
    before = set(threading.enumerate())  # those of other tests in this process may end meanwhile
    batches = stream(Loader(), end_step=1000)
    for _, _ in zip(range(taken), batches, strict=False):
        pass
    if taken:
        assert set(threading.enumerate()) - before
    batches.close()
    assert not set(threading.enumerate()) - before


def test_batches_for_a_gpu_are_in_its_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, pinned = CudaDevices.install(monkeypatch, device=1), []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or devices.pin(tensor))
    (data,) = stream(Loader(), end_step=1, device="cuda:1")
    named = [value for batch in data.batches for value in vars(batch).values()]
    used = [value.device_bounds if isinstance(value, CuSeqlens) else value for value in named]
    used = [value for value in used if isinstance(value, torch.Tensor)]
    assert used and {id(tensor) for tensor in used} == {id(tensor) for tensor in pinned}
    assert devices.contexts == {1}


def test_host_has_the_sample_boundaries() -> None:
    whole = row([IGNORED] * ROW_TOKENS)
    packed = dataclasses.replace(whole, sample_tokens=(3, 2))
    batch = collate([whole, packed], no_images)
    assert batch.samples is not None and batch.samples.packed
    assert batch.samples.bounds.tolist() == [[0, 8], [8, 11], [11, 13]] + 13 * [[0, 0]]
    assert batch.samples.device_bounds.tolist() == [0, 8, 11, 13] + 12 * [16]
    assert not collate([whole, whole], no_images).samples.packed


def test_host_counts_image_tokens() -> None:
    batch = collate([row([IGNORED] * ROW_TOKENS, images=2), row([IGNORED] * ROW_TOKENS, images=1)], no_images)
    assert batch.image_tokens == 3
    assert batch.to(torch.device("cpu"))["image_tokens"] == 3
