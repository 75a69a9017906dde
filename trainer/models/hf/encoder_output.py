"""Features of family hf: the used part of a vision encoder's output, stored by image, and an encoder that gives
it back, so that projectors train on it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from vlmpipe.trainer.models.hf.encoder import (
    encoder_of,
    merged,
    merged_width,
    merger_parts,
    mergers_of,
    without_mergers,
)
from vlmpipe.trainer.models.hf.processor import Tensors, join

PROJECTED_OUTPUTS = ("pooler_output", "deepstack_features")  # of `get_image_features`, after projectors
SAME = 1e-4  # of the largest number: an image alone and with another one, whose sums come in another order

Field = tuple[str, int | None]  # of an encoder's output: its name, and the place from the end in a list


@dataclass(frozen=True)
class StoredOutput:
    """How the features of an image, (rows, width), are taken from an encoder's output and given back.

    kind: class of the output. fields: side by side in a row, all equally wide. lists: lengths of fields that are lists.
    axes: sizes of all axes of a field but the last; -1 is the one along which images are joined. blank_rows, width: of
    features of a blank image. patches: of a token that a merger inside of the encoder makes; each field is then the
    input of a merger. 0 without mergers.
    """

    kind: type[ModelOutput]
    fields: tuple[Field, ...]
    lists: Mapping[str, int]
    axes: tuple[int, ...]
    blank_rows: int
    width: int
    patches: int = 0

    def take(self, output: ModelOutput) -> Tensor:
        return torch.cat([_read(output, field).flatten(0, -2) for field in self.fields], dim=-1)

    def give(self, rows: Tensor, mergers: Sequence[nn.Module] = ()) -> ModelOutput:
        lists: dict[str, list[Tensor | None]] = {name: [None] * length for name, length in self.lists.items()}
        content: dict[str, object] = {**lists}
        if self.patches:
            values = merged(rows, mergers, self.patches)
        else:
            values = [part.reshape(*self.axes, part.shape[-1]) for part in rows.chunk(len(self.fields), dim=-1)]
        for (name, place), value in zip(self.fields, values, strict=True):
            if place is None:
                content[name] = value
            else:
                lists[name][place] = value
        return self.kind(**content)


class StoredEncoder(nn.Module):
    """Stand-in for a vision encoder that returns the output whose features are `rows`. It has the encoder's mergers.

    stored: None where features go to the mergers without it (see `vlmpipe.trainer.models.hf.grids`).
    """

    dtype = torch.float32  # pixels are cast to it

    def __init__(self, encoder: nn.Module, stored: StoredOutput | None) -> None:
        super().__init__()
        state = {key: value for key, value in vars(encoder).items() if not key.startswith("_") and key != "training"}
        self.__dict__.update(state)  # settings that models read, such as spatial_merge_size
        self.stored, self.rows = stored, torch.empty(0)
        for name, part in merger_parts(encoder).items() if stored is None or stored.patches else ():
            self.add_module(name, part)

    def forward(self, *_: object, **__: object) -> ModelOutput:
        assert self.stored is not None
        return self.stored.give(self.rows, mergers_of(self))


def encoder_output(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> ModelOutput:
    """Vision features of images, without running later layers."""
    encoder = encoder_of(model)
    dtype = next(encoder.parameters()).dtype

    def cast(_: nn.Module, args: tuple[object, ...], named: dict[str, object]) -> object:
        return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, named))

    def leave(_: nn.Module, __: object, output: object) -> None:
        raise _Reached(copy.copy(output))

    with encoder.register_forward_pre_hook(cast, with_kwargs=True), encoder.register_forward_hook(leave):
        try:
            model.base_model.get_image_features(**inputs, return_dict=True)
        except _Reached as reached:
            return reached.output
    raise AssertionError("image features come without the vision encoder")


def find_before_mergers(model: PreTrainedModel, images: Sequence[Tensors], blank: Tensors) -> StoredOutput | None:
    """Return `find_stored_output` of the inputs of mergers in the encoder, or None if these do not make its output
    of them, token by token."""
    encoder = encoder_of(model)
    alone = [projected_features(model, inputs) for inputs in images]
    expected = torch.cat([feature for level in zip(*alone, strict=True) for feature in level])
    patches = _patches_of_a_token(model, images[0])
    model.set_encoder(without_mergers(encoder, patches), modality="image")
    try:
        stored = find_stored_output(model, images, blank)
        if stored is None or len(stored.fields) != len(mergers_of(encoder)) or stored.width != merged_width(encoder):
            return None
        stored = replace(stored, patches=patches)
        rows = torch.cat([stored.take(encoder_output(model, inputs)) for inputs in images])
        stand_in = StoredEncoder(encoder, stored)
        stand_in.rows = rows
        model.set_encoder(stand_in, modality="image")
        together = torch.cat(projected_features(model, join(images)))
    except (TypeError, ValueError):  # of a merger that takes or gives more than rows
        return None
    finally:
        model.set_encoder(encoder, modality="image")
    return stored if (together - expected).abs().max() <= SAME * expected.abs().max() else None


def _patches_of_a_token(model: PreTrainedModel, inputs: Tensors) -> int:
    rows: list[int] = []
    first, *_ = mergers_of(encoder_of(model))
    with first.register_forward_hook(lambda _, hidden, tokens: rows.append(len(hidden[0]) // len(tokens))):
        projected_features(model, inputs)
    return rows[0]


def projected_features(model: PreTrainedModel, inputs: Tensors) -> list[Tensor]:
    """Projected features of images, level by level."""
    features = model.base_model.get_image_features(**inputs, return_dict=True)
    return tensors_in(features.get(name) for name in PROJECTED_OUTPUTS)


def find_stored_output(model: PreTrainedModel, images: Sequence[Tensors], blank: Tensors) -> StoredOutput | None:
    """Return the encoder outputs to store, or None if the output for several images differs from that for each.

    images: inputs of some images, one by one. blank: inputs of a blank image.
    """
    alone, together, of_blank = (
        [encoder_output(model, input_) for input_ in inputs] for inputs in (images, [join(images)], [blank])
    )
    fields = tuple(_used_fields(model, images[0], alone[0]))
    parts = [[_read(output, field) for field in fields] for output in (*alone, *together, *of_blank)]
    shapes = [{tuple(tensor.shape) for tensor in tensors} for tensors in parts]
    if not fields or any(len(of_output) != 1 for of_output in shapes):
        return None
    (*levels, whole, blanks) = (next(iter(of_output)) for of_output in shapes)
    axis = next((place for place, size in enumerate(whole[:-1]) if size == sum(shape[place] for shape in levels)), None)
    axes = tuple(-1 if place == axis else size for place, size in enumerate(whole[:-1]))
    if axis is None or any(size != 1 for size in axes[:axis]):
        return None
    if len({(*shape[:axis], *shape[axis + 1 :]) for shape in (*levels, whole, blanks)}) > 1:
        return None
    lists = {name: len(alone[0][name]) for name, place in fields if place is not None}
    stored = StoredOutput(type(alone[0]), fields, lists, axes, 0, whole[-1] * len(fields))
    apart, joined = torch.cat([stored.take(output) for output in alone]), stored.take(together[0])
    if (apart - joined).abs().max() > SAME * joined.abs().max():
        return None
    return StoredOutput(stored.kind, fields, lists, axes, len(stored.take(of_blank[0])), stored.width)


def _used_fields(model: PreTrainedModel, inputs: Tensors, output: ModelOutput) -> Iterator[Field]:
    """Yield the encoder's output fields that projected features depend on: with NaN in one, they become NaN."""
    for name, value in output.items():
        places = range(-len(value), 0) if isinstance(value, list | tuple) else [None]
        for place in places:
            tensor = _read(output, (name, place))
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            spoiled = _replaced(output, (name, place), torch.full_like(tensor, torch.nan))
            with encoder_of(model).register_forward_hook(lambda *_, spoiled=spoiled: spoiled):
                features = projected_features(model, inputs)
            if any(bool(feature.isnan().any()) for feature in features):
                yield name, place


def tensors_in(features: object) -> list[Tensor]:
    if isinstance(features, Tensor):
        return [features]
    return [tensor for feature in features for tensor in tensors_in(feature)] if isinstance(features, Iterable) else []


def _read(output: ModelOutput, field: Field) -> Tensor:
    name, place = field
    read: Tensor = output[name] if place is None else output[name][place]
    return read


def _replaced(output: ModelOutput, field: Field, tensor: Tensor) -> object:
    name, place = field
    changed = copy.copy(output)
    if place is None:
        changed[name] = tensor
    else:
        values = list(output[name])
        values[place] = tensor
        changed[name] = type(output[name])(values)
    return changed


class _Reached(Exception):
    def __init__(self, output: object) -> None:
        self.output = output
