"""The background thread that makes micro-batches."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.fakes.cuda import CudaDevices
from tests.support.trainer.packed_rows import ROW_TOKENS, no_images, row
from vlmpipe.trainer.data.chat.encode import IGNORED
from vlmpipe.trainer.data.loader import PackedSequence
from vlmpipe.trainer.data.sampler import GlobalBatch
from vlmpipe.trainer.dataloading.batches import ImageSource
from vlmpipe.trainer.dataloading.micro_batch_queue import STEPS_AHEAD
from vlmpipe.trainer.dataloading.prefetching_loader import PrefetchingLoader
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.image_inputs import Images

IMAGE_BYTES = 1 << 20
SMALL_BYTES = 1 << 10  # of the other tensors of a micro-batch, at most
DEADLINE_S = 20.0


class Loader:
    """Stands in for PackedLoader: three sequences per step, and an error at one step if wanted."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at, self.asked, self.sampler = fails_at, [], Sampler()

    def read_step(self, step: int, rank: int, world_size: int) -> Iterator[PackedSequence]:
        self.asked.append(step)
        if step == self.fails_at:
            raise DataError("this step cannot be read")
        yield from [
            row([IGNORED] * 4 + [4, 5, IGNORED, 7]),
            row([IGNORED] * ROW_TOKENS),
            row([IGNORED, 1] + [IGNORED] * 6),
        ]


class LongSteps(Loader):
    """Steps of equal sequences with one image each."""

    def __init__(self, sequences: int) -> None:
        super().__init__()
        self.sampler = Sampler(sequences)

    def read_step(self, step: int, rank: int, world_size: int) -> Iterator[PackedSequence]:
        return (row([IGNORED, 1] + [IGNORED] * 6, images=1) for _ in range(self.sampler.sequences))


class CountedImages:
    """An image source that knows how many of its tensors are alive."""

    def __init__(self) -> None:
        self.made = self.alive = self.most = 0
        self.changed = threading.Condition()

    def __call__(self, rows: Sequence[PackedSequence]) -> Images:
        images = torch.empty(IMAGE_BYTES, dtype=torch.uint8)
        with self.changed:
            self.made, self.alive = self.made + 1, self.alive + 1
            self.most = max(self.most, self.alive)
            self.changed.notify_all()
        weakref.finalize(images, self._gone)
        return Images(images)

    def _gone(self) -> None:
        self.alive -= 1


class Sampler:
    """Stands in for PackedBatchSampler: one epoch of batches with four label tokens each."""

    def __init__(self, sequences: int = 3) -> None:
        self.sequences = sequences

    def batch(self, step: int) -> GlobalBatch:
        start = self.sequences * step
        return GlobalBatch(epoch=0, start=start, stop=start + self.sequences, sequences_consumed=start)

    def label_tokens(self, batch: GlobalBatch) -> int:
        return 4

    def loss_terms(self, batch: GlobalBatch) -> int:
        return self.label_tokens(batch)


def stream(
    loader: Loader,
    end_step: int,
    first_step: int = 0,
    device: str = "cpu",
    source: ImageSource = no_images,
    **more: int,
) -> PrefetchingLoader:
    return PrefetchingLoader(
        loader,  # type: ignore[arg-type]
        source,
        micro_batch_size=more.pop("micro_batch_size", 2),
        first_step=first_step,
        end_step=end_step,
        replica=DataParallelRank(index=0, count=1, leads=True, takes_images=True),
        device=torch.device(device),
        **more,
    )


def test_steps_come_in_order_and_in_micro_batches() -> None:
    for step, data in enumerate(stream(Loader(), end_step=5, first_step=2), start=2):
        assert data.step == step
        assert len(data.batches) == 2 and data.slot_tokens == 0
        assert [len(batch.input_ids) for batch in data.batches] == [2, 1]
        assert data.slot_tokens == 3 * ROW_TOKENS and len(data.sample_ids) == 3
    assert step == 4


def test_an_error_of_the_thread_reaches_the_loop() -> None:
    seen = []
    with pytest.raises(DataError, match="cannot be read"):
        for data in stream(Loader(fails_at=2), end_step=9):
            seen.append(len(list(data.batches)))
    assert seen == [2, 2]


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_always_ends_the_thread(taken: int) -> None:
    before = set(threading.enumerate())  # those of other tests in this process may end meanwhile
    batches = stream(Loader(), end_step=1000)
    for _, data in zip(range(taken), batches, strict=False):
        list(data.batches)
    if taken:
        assert set(threading.enumerate()) - before
    batches.close()
    assert not set(threading.enumerate()) - before


def test_batches_for_a_gpu_are_in_its_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, pinned = CudaDevices.install(monkeypatch, device=1), []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or devices.pin(tensor))
    batches = [batch for data in stream(Loader(), end_step=1, device="cuda:1") for batch in data.batches]
    named = [value for batch in batches for value in vars(batch).values()]
    used = [value.device_bounds if isinstance(value, CuSeqlens) else value for value in named]
    used = [value for value in used if isinstance(value, torch.Tensor)]
    assert used and {id(tensor) for tensor in used} == {id(tensor) for tensor in pinned}
    assert devices.contexts == {1}


@pytest.mark.parametrize("accumulation", [8, 64])
def test_the_hosts_memory_does_not_grow_with_accumulation(accumulation: int) -> None:
    source, waiting = CountedImages(), 4
    loader = LongSteps(accumulation)
    bound = waiting * (IMAGE_BYTES + SMALL_BYTES)
    batches = stream(loader, end_step=2, source=source, micro_batch_size=1, ahead_bytes=bound)
    with source.changed:  # the queue is full, and one more waits to be put
        assert source.changed.wait_for(lambda: source.made == waiting + 1, timeout=DEADLINE_S)
    for data in batches:
        assert sum(len(batch.input_ids) for batch in data.batches) == accumulation
    assert source.made == 2 * accumulation
    assert source.most <= waiting + 3  # one that waits, the one in training, and the one before it


def test_steps_that_wait_are_counted_too() -> None:
    """Text takes few bytes, and shards of later steps may push those out that other ranks still read."""
    loader = Loader()
    batches = stream(loader, end_step=1000)
    for data in batches:
        list(data.batches)
        assert max(loader.asked) <= data.step + 1 + STEPS_AHEAD
        if data.step == 20:
            break
    batches.close()
