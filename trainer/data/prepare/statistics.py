"""Statistics of prepared data: lengths, slices, packing efficiency, duplicates, and the score of a constant guess."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.near_duplicates.table import like_train, validation_images
from vlmpipe.trainer.data.packing import plan_packing
from vlmpipe.trainer.data.prepare.digest_files import DIGEST_BYTES
from vlmpipe.trainer.data.prepare.validation.deduplicate import AnswerCounts, ContentCounts
from vlmpipe.trainer.data.sample import SPLITS
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.index_file import CONTENT_BYTES, NAME, SHA256_BYTES, byte_rows, read_columns
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.shards.tar import ShardReader

SLICE_SAMPLES = 100  # of the validation split, that are looked at for the fields of data.slices
COLUMNS = ["tokens", "label_tokens", "turns", "images", "image_tokens"]
PERCENTILES = (5, 50, 95, 100)
HISTOGRAM_BINS = 24
PACKED_AT_ONCE = 1 << 16  # samples
MAX_IMAGES_COUNTED = 16  # samples with more images share the last bar


@dataclass
class Counts:
    """Counts over all samples."""

    answers: AnswerCounts = field(default_factory=AnswerCounts)
    images: ContentCounts = field(default_factory=ContentCounts)  # by their bytes
    samples: ContentCounts = field(default_factory=ContentCounts)  # by their images' bytes and their text
    dropped: int = 0  # samples left out because data.duplicates is drop

    def add(self, lines: pa.Table) -> None:
        """Count accepted samples, of which these are lines (`index_lines.SCHEMA`). `answers` are counted elsewhere."""
        lines = lines.combine_chunks()
        hashes, content = (lines.column(name).combine_chunks() for name in ("image_sha256", "content"))
        are_training = pc.equal(lines.column("split"), "train").to_numpy()
        self.samples.add(byte_rows(content, CONTENT_BYTES), are_training)
        of_images = byte_rows(pc.list_flatten(hashes), SHA256_BYTES)[:, :DIGEST_BYTES]
        self.images.add(of_images, np.repeat(are_training, pc.list_value_length(hashes).to_numpy()))


def describe(folder: Path, counts: Counts, config: DataConfig) -> dict[str, Any]:
    """The content of `stats.json`, from the index in `folder` and the counts."""
    splits = {name: _SplitNumbers(config) for name in SPLITS}
    images, samples = counts.images.totals(), counts.samples.totals()
    sources = {source.name: {name: _zeros() for name in SPLITS} for source in config.sources}
    for split, lines in read_columns(folder / NAME, [*COLUMNS, *(["id"] if sources else [])]):
        splits[split].add(lines)
        for source, of_splits in sources.items():
            _add_sums(of_splits[split], lines.filter(pc.starts_with(lines.column("id"), f"{source}/")))
    return {
        "splits": {name: numbers.describe(images.distinct[name]) for name, numbers in splits.items()},
        **({"sources": sources} if sources else {}),
        "slices": counts.answers.slices(),
        "duplicates": {
            "images": images.repeats,  # images with the bytes of one before
            "samples": samples.repeats + counts.dropped,  # with the images and the text of one before
            "samples_dropped": counts.dropped,
        },
        # An evaluation score on images that were trained on means less.
        "eval_images_also_in_train": images.in_both_splits,
        "eval_samples_also_in_train": samples.in_both_splits,
    }


def near_duplicates(table: Path, num_images: int) -> dict[str, object]:
    """The part of stats.json about validation images that look like training images, equal ones among them.

    `num_images`: distinct validation images, of which only some are searched in a large set.
    """
    searched = validation_images(table)
    result = like_train(table, {sha256: signature for sha256, (*_, signature) in searched.items()})
    return {
        "eval_images": len(result.nearest),
        "searched": result.images,
        "without_signature": result.without_signature,
        "compared": result.compared * (len(searched) / num_images if len(searched) < num_images else 1),
        "pairs": [
            {"eval": searched[sha256][:2], "train": (identity, image), "distance": distance}
            for sha256, (identity, image, distance) in result.closest()
        ],
    }


def _zeros() -> dict[str, int]:
    return dict.fromkeys(("samples", "images", "tokens", "label_tokens"), 0)


def _add_sums(sums: dict[str, int], lines: pa.RecordBatch) -> None:
    """Add lines of the index to the numbers of a source in a split."""
    sums["samples"] += len(lines)
    sums["images"] += int(pc.sum(pc.list_value_length(lines.column("images"))).as_py() or 0)
    for name in ("tokens", "label_tokens"):
        sums[name] += int(pc.sum(lines.column(name)).as_py() or 0)


class _SplitNumbers:
    """Lengths of a split's samples, in memory that does not grow with their number."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._lengths = np.zeros(config.sequence_length + 1, np.int64)  # how many samples have each number of tokens
        self._images = np.zeros(config.max_images_per_sequence + 1, np.int64)  # and each number of images
        self._turns = self._label_tokens = self._rows = 0
        self._unpacked: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []  # tokens and images of samples

    def add(self, lines: pa.RecordBatch) -> None:
        """Add lines of the index."""
        tokens = lines.column("tokens").to_numpy().astype(np.int64)
        images = pc.list_value_length(lines.column("images")).to_numpy().astype(np.int64)
        self._lengths += np.bincount(tokens, minlength=len(self._lengths))
        self._images += np.bincount(images, minlength=len(self._images))
        self._turns += int(lines.column("turns").to_numpy().sum())
        self._label_tokens += int(lines.column("label_tokens").to_numpy().sum())
        self._unpacked.append((tokens, images))
        if sum(len(tokens) for tokens, _ in self._unpacked) >= PACKED_AT_ONCE:
            self._pack()

    def describe(self, unique_images: int) -> dict[str, Any]:
        """The split's part of `stats.json`."""
        self._pack()
        samples = int(self._lengths.sum())
        values = np.arange(len(self._lengths))
        tokens = int(self._lengths @ values)
        longest = max(1, int(values[self._lengths > 0].max(initial=1)))
        bars, edges = np.histogram(values, HISTOGRAM_BINS, (0, longest), weights=self._lengths)
        sequence_length = self._config.sequence_length
        return {
            "samples": samples,
            "turns": self._turns,
            "images": int(self._images @ np.arange(len(self._images))),
            "unique_images": unique_images,
            "tokens": tokens,
            "label_tokens": self._label_tokens,
            "sample_tokens_percentiles": {str(p): round(_percentile(self._lengths, p), 1) for p in PERCENTILES},
            "sample_tokens_histogram": {
                "edges": [round(float(edge), 1) for edge in edges],
                "samples": bars.astype(int).tolist(),
            },
            "images_per_sample": _up_to_the_last(self._images, MAX_IMAGES_COUNTED),
            "packed_sequences": self._rows,
            "packed_fill": round(tokens / (self._rows * sequence_length), 4) if self._rows else 0.0,
            "unpacked_fill": round(tokens / samples / sequence_length, 4) if samples else 0.0,
        }

    def _pack(self) -> None:
        """Pack the added samples and count the sequences; a large set is packed in parts of PACKED_AT_ONCE."""
        if self._unpacked:
            tokens, images = (np.concatenate(arrays) for arrays in zip(*self._unpacked, strict=True))
            rows = plan_packing(
                tokens,
                images,
                sequence_length=self._config.sequence_length,
                max_images_per_sequence=self._config.max_images_per_sequence,
                seed=0,
                epoch=0,
            )
            self._rows += len(rows)
            self._unpacked = []


def _percentile(counts: NDArray[np.int64], percent: int) -> float:
    """numpy's linear percentile of the values 0, 1, 2, ... with these counts."""
    if not counts.sum():
        return 0.0
    place = (int(counts.sum()) - 1) * percent / 100
    below, above = np.searchsorted(np.cumsum(counts), [int(place), math.ceil(place)], side="right")
    return float(below + (above - below) * (place - int(place)))


def _up_to_the_last(counts: NDArray[np.int64], most: int) -> list[int]:
    """Return the counts without trailing zeros; the last one is the sum of those beyond `most`."""
    together = np.append(counts[:most], counts[most:].sum())
    return together[: int(np.flatnonzero(together).max(initial=-1)) + 1].tolist()


def unknown_slices(prepared_uri: str, fields: Sequence[str]) -> Iterator[str]:
    """Describe the fields of data.slices that none of the first validation samples has."""
    if not fields:
        return
    split = Index.load(prepared_uri).split("eval")
    reader = ShardReader.open(open_prepared(prepared_uri))
    looked_at = min(len(split), SLICE_SAMPLES)
    turns = [turn for number in range(looked_at) for turn in reader.turns(split.sample_location(number))]
    known = {name for turn in turns for name, _ in turn.fields}
    for name in fields:
        if name not in known:
            yield f"none of the first {looked_at:,} validation samples has a value of {name} (data.slices)"
