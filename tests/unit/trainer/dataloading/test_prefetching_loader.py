"""The background thread that makes micro-batches."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.fakes.cuda import CudaDevices
from tests.support.trainer.packed_rows import ROW_TOKENS, no_images, row
from vlmpipe.trainer.data.chat.encode import IGNORED
from vlmpipe.trainer.data.loader import PackedSequence
from vlmpipe.trainer.data.sampler import GlobalBatch
from vlmpipe.trainer.dataloading import prefetching_loader
from vlmpipe.trainer.dataloading.batches import ImageSource
from vlmpipe.trainer.dataloading.micro_batch_queue import STEPS_AHEAD
from vlmpipe.trainer.dataloading.prefetching_loader import PrefetchingLoader
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.models import image_threads
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.image_inputs import Images
from vlmpipe.trainer.threads import start_thread

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
    with source.changed:  # the queue is full
        assert source.changed.wait_for(lambda: source.made >= waiting, timeout=DEADLINE_S)
    for data in batches:
        assert sum(len(batch.input_ids) for batch in data.batches) == accumulation
    assert source.made == 2 * accumulation
    assert source.most <= waiting + 2  # the one in training, and the one before it


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


class Unsteady:
    """An image source whose calls end in another order than they begin, each with its own number."""

    def __init__(self, threads: int, fails_at: int | None = None) -> None:
        self.threads, self.fails_at = threads, fails_at
        self.together = self.most = 0
        self.changed = threading.Condition()

    def __call__(self, rows: Sequence[PackedSequence]) -> Images:
        number = int(rows[0].sample_ids[0])
        with self.changed:
            self.together += 1
            self.most = max(self.most, self.together)
            self.changed.notify_all()
            # The first of each group waits until another has come, and so ends after it.
            if self.threads > 1 and number % self.threads == 0 and number:
                self.changed.wait_for(lambda: self.together > 1, timeout=0.05)
            self.together -= 1
        if number == self.fails_at:
            raise DataError(f"image {number} is damaged")
        return Images(torch.full((1,), float(number)))


class Numbered(Loader):
    """Steps of three sequences with one image each, whose samples are numbered through."""

    def read_step(self, step: int, rank: int, world_size: int) -> Iterator[PackedSequence]:
        for number in range(3 * step, 3 * step + 3):
            made = row([IGNORED, 1] + [IGNORED] * 6, images=1)
            yield dataclasses.replace(made, sample_ids=(str(number),))


@pytest.fixture(params=[1, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    image_threads.use_threads(request.param)
    yield request.param
    image_threads.use_threads("auto")


def test_micro_batches_are_the_same_in_the_same_order_by_any_number_of_threads(threads: int) -> None:
    source = Unsteady(threads)
    batches = stream(Numbered(), end_step=20, first_step=5, source=source, micro_batch_size=1)
    found = [float(batch.images[0]) for data in batches for batch in data.batches]  # type: ignore[index]
    assert found == [float(number) for number in range(15, 60)]
    assert source.most <= threads and (source.most > 1) == (threads > 1)


def test_an_error_of_one_of_several_threads_reaches_the_loop_at_its_place(threads: int) -> None:
    batches, found = stream(Numbered(), 20, source=Unsteady(threads, fails_at=7), micro_batch_size=1), []
    with pytest.raises(DataError, match="image 7 is damaged"):
        for data in batches:
            for batch in data.batches:
                found.append(float(batch.images[0]))  # type: ignore[index]
    assert found == [0, 1, 2, 3, 4, 5, 6]
    batches.close()


def test_a_thread_that_cannot_be_started_is_an_error_in_the_loop(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a container's limit of processes, which counts threads."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "_adjust_thread_count", refuse)
    batches, found = stream(Numbered(), end_step=1, micro_batch_size=1), list[Any]()

    def consume() -> None:
        try:
            found.extend(batch for data in batches for batch in data.batches)
        except RuntimeError as error:
            found.append(str(error))

    start_thread(consume, name="loop").join(DEADLINE_S if threads == 1 else 2.0)
    assert len(found) == 3 if threads == 1 else found == ["can't start new thread"]


def test_several_threads_end_with_the_loader(threads: int) -> None:
    before = set(threading.enumerate())
    batches = stream(Numbered(), end_step=1000, source=Unsteady(threads), micro_batch_size=1)
    list(next(iter(batches)).batches)
    batches.close()
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize(("setting", "grown"), [("auto", True), (1, False)])
def test_waits_for_data_bring_more_threads_unless_their_number_is_set(
    setting: Any,
    grown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr(image_threads, "_cores_and_ranks", lambda: (16, 1))
    monkeypatch.setattr(prefetching_loader, "WAIT_WINDOW_S", 0.0)
    request.addfinalizer(lambda: image_threads.use_threads("auto"))
    image_threads.use_threads(setting)
    before = image_threads.num_threads()
    batches = stream(Numbered(), end_step=8, micro_batch_size=1)
    for number, data in enumerate(batches):
        list(data.batches)
        batches.waited_s += 10.0 if number == 4 else 0.0  # all other steps wait for next to nothing
    after = image_threads.num_threads()
    assert (before, after) == ((8, 16) if grown else (1, 1))
    said = capsys.readouterr().out
    assert ("16 threads of each rank" in said and "(data.loader_threads)" in said) == grown
