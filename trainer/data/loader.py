"""Rows of tokens for one rank, read from shards ahead of time by one background thread."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.conversation import IGNORED, Encoded, encode_sample
from trainer.data.index import SplitIndex
from trainer.data.rows import Int64Array
from trainer.data.sequence import RowSequence
from trainer.data.shards import ShardReader
from trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row. Samples follow each other; the rest is padding, a document of its own."""

    input_ids: Int64Array  # (row_tokens,)
    labels: Int64Array  # (row_tokens,), -100 where a token does not count in the loss
    position_ids: Int64Array  # (row_tokens,), restart at 0 for each sample and for the padding
    image_sha256: tuple[str, ...]  # in order of appearance
    image_token_counts: tuple[int, ...]  # of each image
    images: tuple[bytes, ...]  # encoded images in the same order; empty when the loader does not read images
    sample_ids: tuple[str, ...]
    tokens: int  # without padding
    label_tokens: int


class RowLoader:
    """Rows of any step for any rank; steps asked for one after another are read ahead.

    Use it as a context manager, or call `close`. `data_wait_s` grows by the time that callers waited for rows.
    """

    def __init__(
        self,
        split: SplitIndex,
        sequence: RowSequence,
        tokenizer: PreTrainedTokenizerFast,
        reader: ShardReader,
        *,
        images: bool = False,
        prefetch_steps: int = 4,
        stop_step: int | None = None,
    ) -> None:
        """`images`: also read the encoded images. `stop_step`: the step at which training ends, never read."""
        self._split, self._sequence, self._tokenizer, self._reader = split, sequence, tokenizer, reader
        self._images, self._prefetch_steps, self._stop_step = images, prefetch_steps, stop_step
        self._prefetcher: _Prefetcher | None = None
        self._next: tuple[int, int, int] | None = None  # step, rank, world size that the prefetcher gives next
        self.data_wait_s = 0.0

    def rows_for_step(self, step: int, rank: int, world_size: int) -> list[Row]:
        """This rank's rows of an optimizer step: rows rank, rank + world_size, ... of the global batch.

        Every rank gets equally many; where the batch has no row left it is empty, all padding and no image. Raises
        DataError when a shard is damaged.
        """
        assert self._stop_step is None or step < self._stop_step, f"step {step} is beyond stop_step {self._stop_step}"
        started_s = time.perf_counter()
        if self._prefetcher is None or self._next != (step, rank, world_size):
            self.close()
            self._prefetcher = _Prefetcher(
                lambda ahead: self._build_step(ahead, rank, world_size), step, self._stop_step, self._prefetch_steps
            )
        self._next = None  # after an error the thread is gone and the next call starts another
        rows = self._prefetcher.get()
        self._next = (step + 1, rank, world_size)
        self.data_wait_s += time.perf_counter() - started_s
        return rows

    def total_label_tokens(self, step: int) -> int:
        """Label tokens of the step over all ranks; known everywhere without communication."""
        return self._sequence.label_tokens(self._sequence.batch(step))

    def epoch(self, step: int) -> int:
        """The epoch that a step belongs to."""
        return self._sequence.batch(step).epoch

    def rows_consumed(self, step: int) -> int:
        """Rows before this step: the state to save when `step` is the next one."""
        return self._sequence.batch(step).rows_consumed

    def close(self) -> None:
        """Stop the background thread. The loader can be used again."""
        if self._prefetcher:
            self._prefetcher.close()
        self._prefetcher = self._next = None

    def __enter__(self) -> RowLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build_step(self, step: int, rank: int, world_size: int) -> list[Row]:
        batch = self._sequence.batch(step)
        plan = self._sequence.plan(batch.epoch)
        rows = batch.rows_of(rank, world_size)
        return [self.build_row([] if row is None else plan.row(row).tolist()) for row in rows]

    def build_row(self, samples: list[int]) -> Row:
        """The row that holds these samples, by number in the split; none gives the empty row."""
        length = self._sequence.row_tokens
        input_ids = np.full(length, self._tokenizer.pad_token_id, np.int64)
        labels = np.full(length, IGNORED, np.int64)
        position_ids = np.empty(length, np.int64)
        sha256, counts, images = [], [], []
        start = label_tokens = 0
        for number in samples:
            encoded = self._encode(number)
            stop = start + len(encoded.input_ids)
            input_ids[start:stop] = encoded.input_ids
            labels[start:stop] = encoded.labels
            position_ids[start:stop] = np.arange(stop - start)
            start = stop
            label_tokens += encoded.label_tokens
            sha256 += self._split.image_sha256(number)
            counts += self._split.image_token_counts(number)
            if self._images:
                images += self._reader.images(self._split.sample_location(number))
        position_ids[start:] = np.arange(length - start)
        ids = tuple(self._split.ids[number] for number in samples)
        return Row(
            input_ids, labels, position_ids, tuple(sha256), tuple(counts), tuple(images), ids, start, label_tokens
        )

    def _encode(self, number: int) -> Encoded:
        turns = self._reader.turns(self._split.sample_location(number))
        encoded = encode_sample(turns, self._split.image_token_counts(number), self._tokenizer)
        expected = int(self._split.tokens[number])
        if len(encoded.input_ids) != expected:
            raise DataError(
                f"sample {self._split.ids[number]} has {len(encoded.input_ids)} tokens, the index says {expected}",
                expected="the tokenizer that the data was prepared with",
                fix="use the tokenizer saved with the prepared data, or delete its DONE file to prepare it anew",
            )
        return encoded


class _Prefetcher:
    """Calls `build` for step after step in a thread and keeps at most `depth` results."""

    def __init__(self, build: Callable[[int], list[Row]], first_step: int, stop_step: int | None, depth: int) -> None:
        self._build, self._step, self._stop_step = build, first_step, stop_step
        self._results: queue.Queue[list[Row] | BaseException] = queue.Queue()
        self._room = threading.Semaphore(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="row-prefetch", daemon=True)
        # A thread still inside a compiled library while the interpreter is torn down would crash the process.
        atexit.register(self.close)
        self._thread.start()

    def get(self) -> list[Row]:
        result = self._results.get()
        self._room.release()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        self._stopped.set()
        self._room.release()
        self._thread.join()
        atexit.unregister(self.close)

    def _work(self) -> None:
        while self._step != self._stop_step:
            self._room.acquire()
            if self._stopped.is_set():
                return
            try:
                self._results.put(self._build(self._step))
            except BaseException as error:  # handed to the caller of get(), in whose thread it can be handled
                self._results.put(error)
                return
            self._step += 1
