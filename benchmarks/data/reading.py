"""Part `reading`: an epoch of packed sequences from tar shards, beside webdataset's reader of the same shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import webdataset

from benchmarks.support.suite import Bench
from benchmarks.support.workloads import Workload, data_workloads
from vlmpipe.trainer.data.packing import Int64Array
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.shards.tar import FOLDER
from vlmpipe.trainer.models.image_processor import PixelPreparer

Content = tuple[Sequence[str], Sequence[bytes]]  # of a sequence: sample ids, and their encoded images, one each


def reading(bench: Bench) -> None:
    """Parsed, tokenized and packed; then also decoded and resized."""
    loads = data_workloads(bench)
    bench.expect(2 * len(loads))
    for load in loads:
        ours = {pair for ids, images in loaded(load) for pair in zip(ids, images, strict=True)}
        theirs = {pair for ids, images in streamed(load) for pair in zip(ids, images, strict=True)}
        law = "our loader and webdataset give the same samples with the same image bytes"
        bench.report.require(ours == theirs, law)
        pixels = PixelPreparer(load.online.model)
        for decode in (False, True):
            consume = decoded(pixels) if decode else counted
            # A new loader each round: each round verifies the checksums of the shards.
            readers = {"ours": partial(loaded, load), "webdataset": partial(streamed, load)}
            works = {name: partial(epoch, read, consume) for name, read in readers.items()}
            claim = "sequences read, images decoded" if decode else "sequences read"
            found = bench.take_timed_turns(f"{claim}, {load.name}", works)
            sides = ("loader, shuffled, verified", found["ours"]), ("webdataset, in shard order", found["webdataset"])
            bench.report.compare_rates(claim, load.name, "samples", *sides)


def epoch(read: Callable[[], Iterator[Content]], consume: Callable[[Sequence[bytes]], int]) -> float:
    """Read everything. Returns the number of samples."""
    return sum(consume(images) for _, images in read())


def counted(images: Sequence[bytes]) -> int:
    return len(images)


def decoded(pixels: PixelPreparer) -> Callable[[Sequence[bytes]], int]:
    return lambda images: len(pixels(images))


def loaded(load: Workload) -> Iterator[Content]:
    """One epoch from our loader."""
    loader = load.loader()
    for step in range(load.num_steps):
        for sequence in loader.sequences_for_step(step, 0, 1):
            yield sequence.sample_ids, sequence.images


def streamed(load: Workload) -> Iterator[Content]:
    """One epoch from webdataset's own reader: the same parsing and tokenizing, packed as a stream can be."""
    job, chat = load.online, load.chat
    counts, length = [load.image_tokens], job.data.sequence_length
    shards = sorted(str(path) for path in Path(job.pointers().prepared_uri, FOLDER).glob("train-*.tar"))
    ids: list[str] = []
    images: list[bytes] = []
    packed, start = _empty(length, chat.tokenizer.pad_token_id), 0
    for sample in webdataset.WebDataset(shards, shardshuffle=False):
        record = json.loads(sample["json"])
        encoded = chat.encode([Turn(**turn) for turn in record["turns"]], counts)
        size = len(encoded.input_ids)
        if start + size > length:
            yield ids, images
            ids, images, packed, start = [], [], _empty(length, chat.tokenizer.pad_token_id), 0
        packed[:, start : start + size] = encoded.input_ids, encoded.labels, range(size)
        start += size
        ids.append(record["id"])
        images.append(next(content for member, content in sample.items() if member.startswith("0.")))
    yield ids, images


def _empty(length: int, pad: int) -> Int64Array:
    """Token ids, labels and positions: (3, length)."""
    packed = np.zeros((3, length), np.int64)
    packed[0], packed[1] = pad, -100
    return packed
