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
        yield from (tensor for item in value.values() for tensor in _tensors(item))
    elif dataclasses.is_dataclass(value):
        yield from (tensor for var in vars(value).values() for tensor in _tensors(var))


def _pinned(value: object) -> Any:
    if isinstance(value, dict):
        return {name: _pinned(item) for name, item in value.items()}
    return value.pin_memory() if isinstance(value, MOVABLE) else value


def _on(value: object, device: torch.device) -> object:
    if isinstance(value, dict):
        return {name: _on(item, device) for name, item in value.items()}
    return value.to(device, non_blocking=True) if isinstance(value, MOVABLE) else value


class MicroBatches(Sized, Iterable[PackedBatch], Protocol):
    """The micro-batches of a step: as many as their length says, which may be iterated over once."""


def collate(
    sequences: Sequence[PackedSequence],
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
    labels = np.stack([sequence.labels for sequence in sequences])
    next_is_label = np.zeros(labels.shape, dtype=bool)
    next_is_label[:, :-1] = labels[:, 1:] != IGNORED
    start, end = labels.size * part // parts, labels.size * (part + 1) // parts
    places = np.flatnonzero(next_is_label.reshape(-1))  # of the labels of all parts
    is_mine = (places >= start) & (places < end)
    label_index = places[is_mine] - start
    loss_sources = _loss_sources(sequences, places[is_mine], sources) if sources else None
    if answers:
        loss_sources = torch.from_numpy(_answers(sequences, places, answers)[is_mine])
    images = image_source(sequences)
    positions = np.stack(
        [sequence.position_ids for sequence in sequences], axis=-2
    )  # (sequences, tokens) or (axes, sequences, tokens)
    return PackedBatch(
        input_ids=torch.from_numpy(np.stack([sequence.input_ids for sequence in sequences])),
        position_ids=torch.from_numpy(positions),
        label_index=torch.from_numpy(label_index),
        label_ids=torch.from_numpy(labels.reshape(-1)[start + label_index + 1]),
        images=images.values,
        image_grids=images.grids,
        samples=CuSeqlens.of(
            [sequence.segment_tokens for sequence in sequences],
            labels.shape[1],
            [sequence.prefixes for sequence in sequences],
        ),
        image_tokens=sum(sum(sequence.image_token_counts) for sequence in sequences),
        pairs=_pairs(sequences, label_index),
        selection=selection_inputs(sequences, label_index) if sequences[0].selectable else None,
        loss_sources=loss_sources,
    )


def _answers(sequences: Sequence[PackedSequence], places: Int64Array, answers: Mapping[str, int]) -> Int64Array:
    """Return the index of each label's answer. The labels of an answer follow each other; those of a sample's next
    answer follow its question.

    places: positions before those of all labels, in the flattened sequences.
    """
    samples = np.searchsorted(_sample_ends(sequences), places + 1, side="right")
    first = np.array([answers[sample] for sequence in sequences for sample in sequence.sample_ids], np.int64)
    labels = np.arange(len(places))
    of_sample = np.maximum.accumulate(np.where(np.diff(samples, prepend=-2) != 0, labels, 0))
    of_answer = np.maximum.accumulate(np.where(np.diff(places, prepend=-2) != 1, labels, 0))
    index: Int64Array = first[samples] + of_answer - of_sample
    return index


def _loss_sources(sequences: Sequence[PackedSequence], places: Int64Array, sources: Mapping[str, int]) -> Tensor:
    """Return the source index of each label, or of each pair.

    places: positions before those of labels, in the flattened sequences.
    """
    of_samples = np.array(
        [sources[sample.partition("/")[0]] for sequence in sequences for sample in sequence.sample_ids], np.int64
    )
    if sequences[0].references is not None:
        return torch.from_numpy(of_samples)
    return torch.from_numpy(of_samples[np.searchsorted(_sample_ends(sequences), places + 1, side="right")])


def _sample_ends(sequences: Sequence[PackedSequence]) -> list[int]:
    """Return the index after the last token of each sample, or conversation of a pair, in the flattened sequences."""
    length, ends = len(sequences[0].input_ids), []
    for number, sequence in enumerate(sequences):
        ends += (number * length + np.cumsum(sequence.sample_tokens, dtype=np.int64)).tolist()
    return ends


def _pairs(sequences: Sequence[PackedSequence], label_index: Int64Array) -> PreferencePairs | None:
    """label_index: positions before those of labels, in the flattened sequences."""
    if sequences[0].references is None:
        return None
    references = np.concatenate([sequence.references for sequence in sequences if sequence.references is not None])
    is_known = not np.isnan(references).any()
    return PreferencePairs(
        torch.from_numpy(np.searchsorted(_sample_ends(sequences), label_index + 1, side="right")),
        len(references),
        torch.from_numpy(references) if is_known else None,
    )


def cached_images(reader: FeatureReader, config: ModelConfig) -> ImageSource:
    """Features from the cache."""
    published = image_form_of(config).published
    shape = () if published else family_of(config).feature_shape(config)

    def read(sequences: Sequence[PackedSequence]) -> Images:
        images = [image for sequence in sequences for image in sequence.image_sha256]
        features = reader.read_all(images) if images else join_features([], shape)
        if published:
            return Images(
                published.encoded(features, [size for sequence in sequences for size in sequence.image_sizes])
            )
        return Images(features.view(-1, *shape))

    return read


def online_images(prepare: PrepareImages) -> ImageSource:
    """Pixel values, for a vision tower that runs in the training step."""

    def read(sequences: Sequence[PackedSequence]) -> Images:
        return prepare(
            [image for sequence in sequences for image in sequence.images],
            [count for sequence in sequences for count in sequence.sample_images],
        )

    return read


def image_layouts(config: ModelConfig) -> ImageSource:
    """Return the inputs of positions, for a rank without layers that take images: nothing but in family hf, whose
    positions the model computes."""
    published = image_form_of(config).published

    def read(sequences: Sequence[PackedSequence]) -> Images:
        if not published:
            return Images(torch.empty(0))
        return Images(published.without_pixels([size for sequence in sequences for size in sequence.image_sizes]))

    return read
