"""Turns packed sequences into micro-batches of tensors, in a background thread."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.chat.encode import IGNORED
from vlmpipe.trainer.data.loader import PackedLoader, PackedSequence
from vlmpipe.trainer.data.packing import Int64Array
from vlmpipe.trainer.dataloading.selection import selection_inputs
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank
from vlmpipe.trainer.feature_cache.reader import FeatureReader
from vlmpipe.trainer.models.arr_coc.inputs import SelectionInputs
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.image_inputs import Grid, Images, PrepareImages, join_features
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.layers.preference import PreferencePairs
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.threads import start_thread

STEPS_AHEAD = 2
OF_IMAGES = ("images", "image_grids")  # of a training module

MOVABLE = (Tensor, CuSeqlens, PreferencePairs, SelectionInputs)

ImageSource = Callable[[Sequence[PackedSequence]], Images]  # features or pixel values of the images, in order


@dataclass(frozen=True)
class PackedBatch:
    """Packed sequences of one forward pass. See the family's training module for shapes."""

    input_ids: Tensor  # (rows, tokens)
    position_ids: Tensor  # (rows, tokens) or (axes, rows, tokens)
    # (labels,) positions whose next token is a label, in the flattened rows, or in this rank's part of them
    label_index: Tensor
    label_ids: Tensor  # (labels,)
    # (tiles, tokens, hidden) or (tiles, 3, side, side); of some families (tokens of all, numbers), of hf by name
    images: Tensor | dict[str, Any]
    # Known on the host, so that nothing must be read from the device.
    image_grids: tuple[Grid, ...] | None = None  # of each image, for a tower whose images differ in size
    samples: CuSeqlens | None = None  # boundaries of samples, if known
    image_tokens: int | None = None  # of all images, if known
    pairs: PreferencePairs | None = None  # of samples that are pairs
    selection: SelectionInputs | None = None  # where the model selects tokens of images

    def to(self, device: torch.device, *, images: bool = True) -> dict[str, Any]:
        """Arguments of a training module by name, tensors on the device. `images`: include those of images."""
        named = {name: value for name, value in self._known().items() if images or name not in OF_IMAGES}
        return {name: _on(value, device) for name, value in named.items()}

    def images_to(self, device: torch.device) -> dict[str, Any]:
        """The image arguments alone."""
        return {name: _on(value, device) for name, value in self._known().items() if name in OF_IMAGES}

    def pinned(self) -> PackedBatch:
        """A copy in page-locked memory, from which copies to a GPU are asynchronous."""
        return dataclasses.replace(self, **{name: _pinned(value) for name, value in self._known().items()})

    def _known(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in named.items() if value is not None}


def _pinned(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _pinned(one) for name, one in value.items()}
    return value.pin_memory() if isinstance(value, MOVABLE) else value


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _on(one, device) for name, one in value.items()}
    return value.to(device, non_blocking=True) if isinstance(value, MOVABLE) else value


@dataclass(frozen=True)
class StepBatches:
    """One rank's batches of one step. Counts are this rank's unless they are named global."""

    step: int
    epoch: int
    batches: list[PackedBatch]
    global_label_tokens: int
    global_loss_terms: int  # the divisor of the summed loss
    useful_tokens: int
    slot_tokens: int
    images: int  # or tiles
    sample_ids: tuple[str, ...]


def collate(rows: Sequence[PackedSequence], image_source: ImageSource, *, part: int = 0, parts: int = 1) -> PackedBatch:
    """One micro-batch of packed sequences, with the labels of one of `parts` equal parts of their tokens."""
    labels = np.stack([row.labels for row in rows])
    next_is_label = np.zeros(labels.shape, dtype=bool)
    next_is_label[:, :-1] = labels[:, 1:] != IGNORED
    start, end = labels.size * part // parts, labels.size * (part + 1) // parts
    label_index = np.flatnonzero(next_is_label.reshape(-1)[start:end])
    images = image_source(rows)
    positions = np.stack([row.position_ids for row in rows], axis=-2)  # (rows, tokens) or (axes, rows, tokens)
    return PackedBatch(
        input_ids=torch.from_numpy(np.stack([row.input_ids for row in rows])),
        position_ids=torch.from_numpy(positions),
        label_index=torch.from_numpy(label_index),
        label_ids=torch.from_numpy(labels.reshape(-1)[start + label_index + 1]),
        images=images.values,
        image_grids=images.grids,
        samples=CuSeqlens.of([row.sample_tokens for row in rows], labels.shape[1]),
        image_tokens=sum(sum(row.image_token_counts) for row in rows),
        pairs=_pairs(rows, label_index),
        selection=selection_inputs(rows, label_index) if rows[0].selectable else None,
    )


def _pairs(rows: Sequence[PackedSequence], label_index: Int64Array) -> PreferencePairs | None:
    """label_index: positions before those of labels, in the flattened rows."""
    if rows[0].references is None:
        return None
    length, ends = len(rows[0].input_ids), []
    for number, row in enumerate(rows):
        ends += (number * length + np.cumsum(row.sample_tokens, dtype=np.int64)).tolist()
    references = np.concatenate([row.references for row in rows if row.references is not None])
    is_known = not np.isnan(references).any()
    return PreferencePairs(
        torch.from_numpy(np.searchsorted(ends, label_index + 1, side="right")),
        len(references),
        torch.from_numpy(references) if is_known else None,
    )


def cached_images(reader: FeatureReader, config: ModelConfig) -> ImageSource:
    """Features from the cache."""
    published = image_form_of(config).published
    shape = () if published else family_of(config).feature_shape(config)

    def read(rows: Sequence[PackedSequence]) -> Images:
        images = [image for row in rows for image in row.image_sha256]
        features = reader.read_all(images) if images else join_features([], shape)
        if published:
            return Images(published.encoded(features, [size for row in rows for size in row.image_sizes]))
        return Images(features.view(-1, *shape))

    return read


def online_images(prepare: PrepareImages) -> ImageSource:
    """Pixel values, for a vision tower that runs in the training step."""

    def read(rows: Sequence[PackedSequence]) -> Images:
        return prepare(
            [image for row in rows for image in row.images], [count for row in rows for count in row.sample_images]
        )

    return read


def no_images(_rows: Sequence[PackedSequence]) -> Images:
    """For a rank without layers that take images."""
    return Images(torch.empty(0))


class PrefetchingLoader:
    """The batches of one rank, made a few steps ahead. `waited_s` is the time that the loop waited for them."""

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
    ) -> None:
        self.waited_s = 0.0
        self._device = device
        self._loader, self._image_source, self._micro_rows = loader, image_source, micro_batch_size
        self._steps = range(first_step, end_step)
        self._replica = replica
        self._queue: queue.Queue[StepBatches | BaseException | None] = queue.Queue(maxsize=STEPS_AHEAD)
        self._stop = threading.Event()
        self._thread = start_thread(self._produce, name="batches")

    def __iter__(self) -> Iterator[StepBatches]:
        while True:
            started = time.perf_counter()
            item = self._queue.get()
            self.waited_s += time.perf_counter() - started
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Stop the producer, even if the queue is full."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
        self._thread.join()

    def _produce(self) -> None:
        try:
            for step in self._steps:
                if self._stop.is_set():
                    return
                self._queue.put(self._make(step))
            self._queue.put(None)
        except BaseException as error:  # raised in the loop
            self._queue.put(error)

    def _make(self, step: int) -> StepBatches:
        replica = self._replica
        rows = self._loader.sequences_for_step(step, replica.index, replica.count)
        batch, size = self._loader.sampler.batch(step), self._micro_rows
        batches = [
            collate(rows[i : i + size], self._image_source, part=replica.part, parts=replica.parts)
            for i in range(0, len(rows), size)
        ]
        return StepBatches(
            step=step,
            epoch=batch.epoch,
            batches=[one.pinned() for one in batches] if self._device.type == "cuda" else batches,
            global_label_tokens=self._loader.sampler.label_tokens(batch),
            global_loss_terms=self._loader.sampler.loss_terms(batch),
            useful_tokens=sum(row.tokens for row in rows),
            slot_tokens=sum(len(row.input_ids) for row in rows),
            images=sum(row.tiles for row in rows),
            sample_ids=tuple(sample for row in rows for sample in row.sample_ids),
        )
