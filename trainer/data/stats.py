"""What prepared data holds, in numbers: lengths, slices, how well rows fill, duplicates, and what a guess scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trainer.config import DataConfig
from trainer.data.disk_table import short_digest
from trainer.data.index import NAME
from trainer.data.rows import plan_rows
from trainer.data.samples import SPLITS, Split, Turn
from trainer.data.seen import AnswerCounts, SeenContent

PERCENTILES = (5, 50, 95, 100)
HISTOGRAM_BINS = 24
MOST_IMAGES_COUNTED = 16  # samples with more images share the last bar


@dataclass
class Counts:
    """Everything that is counted over all samples."""

    answers: AnswerCounts = field(default_factory=AnswerCounts)
    images: SeenContent = field(default_factory=SeenContent)  # by their bytes
    samples: SeenContent = field(default_factory=SeenContent)  # by their images' bytes and their text
    dropped: int = 0  # samples left out because data.duplicates is drop

    def add(self, split: Split, image_sha256: list[str], content: str) -> None:
        """One accepted sample, with its `sample_digest`. Its answers are counted where they are read."""
        self.samples.add(bytes.fromhex(content), split)
        for sha256 in image_sha256:
            self.images.add(bytes.fromhex(sha256)[:16], split)


def sample_digest(turns: tuple[Turn, ...], image_sha256: list[str]) -> str:
    """Equal for samples that say the same about pictures with the same bytes, whatever their ids. Hexadecimal."""
    return short_digest([(turn.question, turn.answer) for turn in turns], image_sha256).hex()


def describe(folder: Path, counts: Counts, config: DataConfig) -> dict[str, Any]:
    """The content of `stats.json`, from the index in `folder` and what was counted."""
    columns = ["split", "tokens", "label_tokens", "turns", "image_widths"]
    table = pq.read_table(folder / NAME, columns=columns)
    splits = {}
    for name in SPLITS:
        part = table.filter(pc.equal(table.column("split"), name))
        numbers = {column: part.column(column).to_numpy() for column in ("tokens", "label_tokens", "turns")}
        images = pc.list_value_length(part.column("image_widths")).to_numpy().astype(np.int64)
        splits[name] = _describe_split(numbers, images, counts.images.distinct(name), config)
    return {
        "splits": splits,
        "slices": counts.answers.slices(),
        "duplicates": {
            "images": counts.images.repeats(),  # images with the bytes of one before
            "samples": counts.samples.repeats() + counts.dropped,  # with the images and the text of one before
            "samples_dropped": counts.dropped,
        },
        # Not a fault by itself, but a held-out score on pictures that were trained on means less.
        "eval_images_also_in_train": counts.images.in_both_splits(),
        "eval_samples_also_in_train": counts.samples.in_both_splits(),
    }


def _describe_split(
    numbers: dict[str, NDArray[Any]], images: NDArray[np.int64], unique_images: int, config: DataConfig
) -> dict[str, Any]:
    """`numbers` and `images`: (samples,), in the order of the index."""
    tokens = numbers["tokens"]
    row_tokens, row_images = config.row_tokens, config.row_images
    plan = plan_rows(tokens, images, row_tokens=row_tokens, row_images=row_images, seed=0, epoch=0)
    lengths = np.percentile(tokens, PERCENTILES) if len(tokens) else np.zeros(len(PERCENTILES))
    longest = max(1, int(tokens.max(initial=1)))
    bars, edges = np.histogram(tokens, HISTOGRAM_BINS, (0, longest))
    return {
        "samples": len(tokens),
        "turns": int(numbers["turns"].sum()),
        "images": int(images.sum()),
        "unique_images": unique_images,
        "tokens": int(tokens.sum()),
        "label_tokens": int(numbers["label_tokens"].sum()),
        "sample_tokens_percentiles": {str(p): round(float(v), 1) for p, v in zip(PERCENTILES, lengths, strict=True)},
        "sample_tokens_histogram": {"edges": [round(float(edge), 1) for edge in edges], "samples": bars.tolist()},
        "images_per_sample": np.bincount(np.minimum(images, MOST_IMAGES_COUNTED)).tolist(),
        "packed_rows": len(plan),
        "packed_fill": round(plan.fill, 4),
        "unpacked_fill": round(float(tokens.mean()) / row_tokens, 4) if len(tokens) else 0.0,
    }
