"""Turns packed sequences into micro-batches of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.chat.encode import IGNORED
from vlmpipe.trainer.data.loader import PackedSequence
from vlmpipe.trainer.data.packing import Int64Array
from vlmpipe.trainer.dataloading.selection import selection_inputs
from vlmpipe.trainer.feature_cache.reader import FeatureReader
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.image_inputs import Grid, Images, NamedImages, PrepareImages, join_features
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.layers.selection_inputs import SelectionInputs
from vlmpipe.trainer.models.loss.pairs import PreferencePairs
from vlmpipe.trainer.models.packed_vlm import PackedInputs
from vlmpipe.trainer.models.registry import family_of

MOVABLE = (Tensor, CuSeqlens, PreferencePairs, SelectionInputs)

ImageSource = Callable[[Sequence[PackedSequence]], Images]  # features or pixel values of the images, in order


@dataclass(frozen=True)
class PackedBatch:
    """Packed sequences of one forward pass, as `PackedInputs` on the host. label_index: of this rank's part of them."""

    input_ids: Tensor
    position_ids: Tensor
    label_index: Tensor
    label_ids: Tensor
    images: Tensor | NamedImages
    # Known on the host, so that nothing must be read from the device.
    image_grids: tuple[Grid, ...] | None = None  # of each image, for a tower whose images differ in size
    samples: CuSeqlens | None = None  # boundaries of samples, if known
    image_tokens: int | None = None  # of all images, if known
    pairs: PreferencePairs | None = None  # of samples that are pairs
    selection: SelectionInputs | None = None  # where the model selects tokens of images
    loss_sources: Tensor | None = None  # (labels,) or (pairs,) index of the source, where losses are told apart by it

    def to(self, device: torch.device) -> PackedInputs:
        """Arguments of a training module by name, tensors on the device."""
        return cast(PackedInputs, {name: _on(value, device) for name, value in self._known().items()})

    def pinned(self) -> PackedBatch:
        """A copy in page-locked memory, from which copies to a GPU are asynchronous."""
        return dataclasses.replace(self, **{name: _pinned(value) for name, value in self._known().items()})

    def held_bytes(self, *, pinned: bool) -> int:
        """Memory of the host that the tensors take. Torch rounds what is page-locked up to a power of two."""
        sizes = (tensor.untyped_storage().nbytes() for value in self._known().values() for tensor in _tensors(value))
        return sum(1 << (size - 1).bit_length() if pinned and size else size for size in sizes)

    def _known(self) -> dict[str, object]:
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in named.items() if value is not None}


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (tensor for one in value.values() for tensor in _tensors(one))
    elif dataclasses.is_dataclass(value):
        yield from (tensor for var in vars(value).values() for tensor in _tensors(var))


def _pinned(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _pinned(one) for name, one in value.items()}
    return value.pin_memory() if isinstance(value, MOVABLE) else value


def _on(value: object, device: torch.device) -> object:
    if isinstance(value, dict):
        return {name: _on(one, device) for name, one in value.items()}
    return value.to(device, non_blocking=True) if isinstance(value, MOVABLE) else value


class MicroBatches(Sized, Iterable[PackedBatch], Protocol):
    """The micro-batches of a step: as many as their length says, which may be iterated over once."""


def collate(
    rows: Sequence[PackedSequence],
    image_source: ImageSource,
    *,
    part: int = 0,
    parts: int = 1,
    sources: Mapping[str, int] | None = None,
    answers: Mapping[str, int] | None = None,
) -> PackedBatch:
    """One micro-batch of packed sequences, with the labels of one of `parts` equal parts of their tokens.

    sources: index of each source by its name, for losses by source.
    answers: index of each sample's first answer by the sample's id, in place of sources: a sample takes as many indexes
        as it has labels.
    """
    labels = np.stack([row.labels for row in rows])
    next_is_label = np.zeros(labels.shape, dtype=bool)
    next_is_label[:, :-1] = labels[:, 1:] != IGNORED
    start, end = labels.size * part // parts, labels.size * (part + 1) // parts
    places = np.flatnonzero(next_is_label.reshape(-1))  # of the labels of all parts
    is_mine = (places >= start) & (places < end)
    label_index = places[is_mine] - start
    loss_sources = _loss_sources(rows, places[is_mine], sources) if sources else None
    if answers:
        loss_sources = torch.from_numpy(_answers(rows, places, answers)[is_mine])
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
        loss_sources=loss_sources,
    )


def _answers(rows: Sequence[PackedSequence], places: Int64Array, answers: Mapping[str, int]) -> Int64Array:
    """Return the index of each label's answer. The labels of an answer follow each other; those of a sample's next
    answer follow its question.

    places: positions before those of all labels, in the flattened sequences.
    """
    samples = np.searchsorted(_sample_ends(rows), places + 1, side="right")
    first = np.array([answers[sample] for row in rows for sample in row.sample_ids], np.int64)
    labels = np.arange(len(places))
    of_sample = np.maximum.accumulate(np.where(np.diff(samples, prepend=-2) != 0, labels, 0))
    of_answer = np.maximum.accumulate(np.where(np.diff(places, prepend=-2) != 1, labels, 0))
    index: Int64Array = first[samples] + of_answer - of_sample
    return index


def _loss_sources(rows: Sequence[PackedSequence], places: Int64Array, sources: Mapping[str, int]) -> Tensor:
    """Return the source index of each label, or of each pair.

    places: positions before those of labels, in the flattened sequences.
    """
    of_samples = np.array([sources[sample.partition("/")[0]] for row in rows for sample in row.sample_ids], np.int64)
    if rows[0].references is not None:
        return torch.from_numpy(of_samples)
    return torch.from_numpy(of_samples[np.searchsorted(_sample_ends(rows), places + 1, side="right")])


def _sample_ends(rows: Sequence[PackedSequence]) -> list[int]:
    """Return the index after the last token of each sample, or conversation of a pair, in the flattened sequences."""
    length, ends = len(rows[0].input_ids), []
    for number, row in enumerate(rows):
        ends += (number * length + np.cumsum(row.sample_tokens, dtype=np.int64)).tolist()
    return ends


def _pairs(rows: Sequence[PackedSequence], label_index: Int64Array) -> PreferencePairs | None:
    """label_index: positions before those of labels, in the flattened rows."""
    if rows[0].references is None:
        return None
    references = np.concatenate([row.references for row in rows if row.references is not None])
    is_known = not np.isnan(references).any()
    return PreferencePairs(
        torch.from_numpy(np.searchsorted(_sample_ends(rows), label_index + 1, side="right")),
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
