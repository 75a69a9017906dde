"""What the data path is compared with: padding, greedy packing, webdataset's reader, and images decoded by hand."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import webdataset
from PIL import Image
from torch import Tensor

from benchmarks.workloads import Workload
from trainer.config.model import ModelConfig
from trainer.data.packing import Int64Array
from trainer.data.sample import Turn
from trainer.data.shards.tar import FOLDER
from trainer.data.tokenize import encode_sample
from trainer.models.registry import family_of

RowContent = tuple[Sequence[str], Sequence[bytes]]  # sample ids; encoded images, one a sample in the built-in sets


@dataclass(frozen=True)
class Lengths:
    """What packing depends on."""

    tokens: Int64Array  # (samples,)
    images: Int64Array  # (samples,)
    sequence_length: int
    max_images_per_sequence: int


def padded_slots(order: Int64Array, lengths: Lengths, batch: int) -> int:
    """Tokens computed when the samples of each batch are padded to the longest among them."""
    tokens = lengths.tokens[order]
    batches = [tokens[start : start + batch] for start in range(0, len(tokens), batch)]
    return sum(len(padded) * int(padded.max()) for padded in batches)


def first_come_rows(order: Int64Array, lengths: Lengths) -> int:
    """Rows that a stream fills: a row is closed as soon as the next sample does not fit."""
    rows, free_tokens, free_images = 0, 0, 0
    for tokens, images in zip(lengths.tokens[order].tolist(), lengths.images[order].tolist(), strict=True):
        if tokens > free_tokens or images > free_images:
            rows, free_tokens, free_images = rows + 1, lengths.sequence_length, lengths.max_images_per_sequence
        free_tokens, free_images = free_tokens - tokens, free_images - images
    return rows


def first_fit_rows(order: Int64Array, lengths: Lengths, window: int) -> int:
    """Rows of greedy packing: samples in the order they come, each into the first row of its window with room."""
    total = 0
    tokens, images = lengths.tokens[order].tolist(), lengths.images[order].tolist()
    for start in range(0, len(order), window):
        free: list[list[int]] = []  # tokens and images of each row
        for size, count in zip(tokens[start : start + window], images[start : start + window], strict=True):
            row = next((row for row in free if row[0] >= size and row[1] >= count), None)
            if row is None:
                row = [lengths.sequence_length, lengths.max_images_per_sequence]
                free.append(row)
            row[0] -= size
            row[1] -= count
        total += len(free)
    return total


def decoded(images: Sequence[bytes]) -> int:
    """Pillow's bare decoding: the least that anyone must do."""
    for data in images:
        Image.open(io.BytesIO(data)).convert("RGB")
    return len(images)


def decoded_by_hand(images: Sequence[bytes], model: ModelConfig) -> Tensor:
    """What a training script on img2dataset's tars does with Pillow and NumPy: (images, 3, side, side) fp32."""
    processor = family_of(model).image_processor(model)
    mean, deviation = np.array(processor.image_mean, np.float32), np.array(processor.image_std, np.float32)
    pixels = []
    for data in images:
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        resized = picture.resize((model.image_size, model.image_size), Image.Resampling(processor.resample))
        values = (np.asarray(resized, np.float32) / 255 - mean) / deviation
        pixels.append(torch.from_numpy(values.transpose(2, 0, 1)))
    return torch.stack(pixels)


def webdataset_rows(load: Workload) -> Iterator[RowContent]:
    """One epoch from webdataset's own reader: the same parsing and tokenizing, packed as a stream can be."""
    job, tokenizer = load.online, load.tokenizer
    counts, length = [load.image_tokens], job.data.sequence_length
    shards = sorted(str(path) for path in Path(job.pointers().prepared_uri, FOLDER).glob("train-*.tar"))
    ids: list[str] = []
    images: list[bytes] = []
    row, start = _empty_row(length, tokenizer.pad_token_id), 0
    for sample in webdataset.WebDataset(shards, shardshuffle=False):
        record = json.loads(sample["json"])
        encoded = encode_sample([Turn(**turn) for turn in record["turns"]], counts, tokenizer)
        size = len(encoded.input_ids)
        if start + size > length:
            yield ids, images
            ids, images, row, start = [], [], _empty_row(length, tokenizer.pad_token_id), 0
        row[:, start : start + size] = encoded.input_ids, encoded.labels, range(size)
        start += size
        ids.append(record["id"])
        images.append(next(content for member, content in sample.items() if member.startswith("0.")))
    yield ids, images


def _empty_row(length: int, pad: int) -> Int64Array:
    """Token ids, labels and positions: (3, length)."""
    row = np.zeros((3, length), np.int64)
    row[0], row[1] = pad, -100
    return row
