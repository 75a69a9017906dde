"""Makes a rank's micro-batches in background threads, some ahead of training.

One thread reads samples, in order. Several decode and prepare the images of as many micro-batches as give each of them
an image; the queue keeps the order. Threads, not worker processes: each process would hold the index and a tokenizer,
and copy pixels, while decoding, resizing and NumPy release Python's lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import islice

import torch

from vlmpipe.trainer.data.loader import PackedLoader, PackedSequence
from vlmpipe.trainer.dataloading.batches import ImageSource, MicroBatches, PackedBatch, collate
from vlmpipe.trainer.dataloading.micro_batch_queue import AHEAD_BYTES, MicroBatchQueue, Place
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank
from vlmpipe.trainer.models.image_threads import max_threads, more_threads, num_threads
from vlmpipe.trainer.threads import start_thread, thread_pool

WAIT_WINDOW_S = 20.0  # over which waits for data are compared with the time
MAX_WAIT_SHARE = 0.05  # above which more threads prepare images


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch and what metrics count of it."""

    batch: PackedBatch
    useful_tokens: int
    slot_tokens: int
    images: int
    sample_ids: tuple[str, ...]


@dataclass
class StepBatches:
    """One rank's micro-batches of one step, which are made while they are taken, and can be taken once.

    Counts are this rank's unless they are named global; those with a default are of the micro-batches taken so far.
    """

    step: int
    epoch: int
    batches: MicroBatches
    global_label_tokens: int
    global_loss_terms: int  # the divisor of the summed loss
    useful_tokens: int = 0
    slot_tokens: int = 0
    images: int = 0
    sample_ids: tuple[str, ...] = ()

    def count(self, taken: MicroBatch) -> None:
        self.useful_tokens += taken.useful_tokens
        self.slot_tokens += taken.slot_tokens
        self.images += taken.images
        self.sample_ids += taken.sample_ids


class PrefetchingLoader:
    """The steps of one rank. `waited_s` is the time that the loop waited for micro-batches; `ahead_bytes` bounds what
    waits for it."""

    def __init__(
        self,
        loader: PackedLoader,
        image_source: ImageSource,
        *,
        micro_batch_size: int,
        first_step: int,
        end_step: int,
        replica: DataParallelRank,
        device: torch.device,
        ahead_bytes: int = AHEAD_BYTES,
        sources: Sequence[str] = (),
    ) -> None:
        """sources: their names, where losses are told apart by them."""
        self.waited_s = 0.0
        self._pins = device.type == "cuda"
        self._loader, self._image_source, self._micro_sequences = loader, image_source, micro_batch_size
        self._steps = range(first_step, end_step)
        self._replica, self._sources = replica, {name: number for number, name in enumerate(sources)}
        self._queue: MicroBatchQueue[StepBatches | MicroBatch | BaseException | None] = MicroBatchQueue(ahead_bytes)
        self._window_began_s, self._waited_before_s = 0.0, 0.0
        self._thread = start_thread(self._produce, name="batches")

    def __iter__(self) -> Iterator[StepBatches]:
        """The steps in order. A step's micro-batches are taken before the next step."""
        while (item := self._get()) is not None:
            assert isinstance(item, StepBatches), "the micro-batches of the step before were not all taken"
            yield item
            self._judge_waits(item.step)

    def close(self) -> None:
        """Stop the producer, which completes its current micro-batches."""
        self._queue.close()
        self._thread.join()

    def _judge_waits(self, step: int) -> None:
        """Take more threads where training has waited for data (data.loader_threads: auto). The first step, for which
        nothing was made ahead, does not count."""
        now_s = time.perf_counter()
        if not self._window_began_s:
            self._window_began_s, self._waited_before_s = now_s, self.waited_s
            return
        if (seconds := now_s - self._window_began_s) < WAIT_WINDOW_S:
            return
        share = (self.waited_s - self._waited_before_s) / seconds
        self._window_began_s, self._waited_before_s = now_s, self.waited_s
        if share <= MAX_WAIT_SHARE or not (threads := more_threads()):
            return
        if self._replica.index == 0 and self._replica.part == 0:
            print(
                f"train: {share:.0%} of the last {seconds:.0f} s were waits for data: {threads} threads of each rank "
                f"that waits prepare images from step {step + 2} on (data.loader_threads)",
                flush=True,
            )

    def _get(self) -> StepBatches | MicroBatch | None:
        started_s = time.perf_counter()
        item = self._queue.get()
        self.waited_s += time.perf_counter() - started_s
        if isinstance(item, BaseException):
            raise item
        return item

    def take(self, data: StepBatches) -> PackedBatch:
        """The next micro-batch of a step. See `StepBatches.batches`."""
        item = self._get()
        assert isinstance(item, MicroBatch)
        data.count(item)
        return item.batch

    def _produce(self) -> None:
        try:
            with thread_pool(max_threads(), name="micro-batches") as pool:
                if all(self._put_step(step, pool) for step in self._steps):
                    self._queue.put(None)
        except BaseException as error:  # raised in the loop
            self._queue.put(error)

    def _put_step(self, step: int, pool: Executor) -> bool:
        """Make a step's micro-batches. False once the queue is closed."""
        replica, batch = self._replica, self._loader.sampler.batch(step)
        count = len(batch.sequences_of(replica.index, replica.count))
        batches = _Taken(self, -(-count // self._micro_sequences))
        data = StepBatches(
            step=step,
            epoch=batch.epoch,
            batches=batches,
            global_label_tokens=self._loader.sampler.label_tokens(batch),
            global_loss_terms=self._loader.sampler.loss_terms(batch),
        )
        batches.data = data
        if not self._queue.put(data, begins_step=True):
            return False
        sequences = self._loader.read_step(step, replica.index, replica.count)
        return all(self._put(list(islice(sequences, self._micro_sequences)), pool) for _ in range(len(batches)))

    def _put(self, sequences: Sequence[PackedSequence], pool: Executor) -> bool:
        """Make a micro-batch, in another thread where there are several."""
        images, threads = max(1, sum(len(sequence.image_sha256) for sequence in sequences)), num_threads()
        place = self._queue.reserve(images, threads)
        if place is None:
            return False
        if threads == 1:
            self._make(sequences, place)
        else:
            try:
                pool.submit(self._make, sequences, place)
            except RuntimeError as error:  # no thread can be started, and maybe none fills the place
                self._queue.fill(place, error)
                return False
        return True

    def _make(
        self, sequences: Sequence[PackedSequence], place: Place[StepBatches | MicroBatch | BaseException | None]
    ) -> None:
        try:
            part, parts = self._replica.part, self._replica.parts
            batch = collate(sequences, self._image_source, part=part, parts=parts, sources=self._sources)
            made = MicroBatch(
                batch.pinned() if self._pins else batch,
                useful_tokens=sum(sequence.tokens for sequence in sequences),
                slot_tokens=sum(len(sequence.input_ids) for sequence in sequences),
                images=sum(sequence.shown for sequence in sequences),
                sample_ids=tuple(sample for sequence in sequences for sample in sequence.sample_ids),
            )
            self._queue.fill(place, made, held_bytes=batch.held_bytes(pinned=self._pins))
        except BaseException as error:  # raised in the loop, at its place
            self._queue.fill(place, error)


class _Taken:
    """A step's micro-batches as `MicroBatches`. Holds none of them."""

    data: StepBatches

    def __init__(self, loader: PrefetchingLoader, count: int) -> None:
        self._loader, self._count = loader, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[PackedBatch]:
        return (self._loader.take(self.data) for _ in range(self._count))
