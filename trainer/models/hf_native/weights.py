"""Initial weights of transformers models, one tensor at a time, under the names of the current release."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.base import Weights
from vlmpipe.trainer.models.hf_native.pretrained import PICKLES, load_complete, part_config
from vlmpipe.trainer.models.hf_native.weight_files import RangedFile, RangedTensor, WeightFiles, weight_files
from vlmpipe.trainer.models.safetensors_header import read_index

HEAD = "lm_head.weight"
ROWS_AT_ONCE = 1024  # of an embedding


@dataclass(frozen=True)
class PretrainedModel:
    """A transformers model and the names of its weights."""

    kind: type[PreTrainedModel] | None  # None for a part that is stored in larger models only
    embedding: str = ""  # name of the embedding's weight
    tower: str = ""  # prefix of the vision encoder's weights
    # Prefixes of names -> those in other files: of older releases, or of models that the part is stored in.
    stored_as: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # A name in files -> that in the current release; empty for a part of a weight, or one in another form.
    renamed: Callable[[str], str] = str


class StoredWeights:
    """Pretrained weights in fp32, with at least `num_tokens` rows of embedding and head.

    Read from safetensors files that hold a known name (`vlmpipe.trainer.models.hf_native.weight_files`); a model in
    another form is loaded whole and held in memory for as long as this object lives. No weight is drawn: what is
    missing is a ConfigError.
    """

    def __init__(
        self,
        part: WeightsConfig,
        model: PretrainedModel,
        num_tokens: int = 0,
        *,
        is_tied: bool = True,
        **loading: object,
    ) -> None:
        """
        Args:
            is_tied: a head that is not stored is the embedding.
            loading: further arguments of `load_complete`, for a model in another form.
        """
        self._part, self._model, self._num_tokens, self._loading = part, model, num_tokens, loading
        self._is_tied = is_tied

    def read(self, name: str) -> Tensor:
        known, has_rows = self._stored_name(name), self._has_rows(name)
        if not known:
            tensor: Tensor = self._whole[name]
            return _with_rows(tensor, tuple(tensor.shape), self._num_tokens) if has_rows else tensor
        with self._opened(known) as file:
            if has_rows:
                stored = file.get_slice(known)
                return _with_rows(stored, stored.get_shape(), self._num_tokens)
            tensor = file.get_tensor(known)
        return tensor.float() if tensor.is_floating_point() else tensor

    def require(self, part: str, shapes: Mapping[str, torch.Size]) -> None:
        """Raise ConfigError unless all these weights are there, in these shapes. Reads headers of files only.

        A model that is no part of a larger one may be in another form, of which loading it tells.
        """
        stored = {name: self._stored_name(name) for name in shapes}
        missing = [name for name, known in stored.items() if not known]
        if missing and self._model.kind and part_config(self._part).model_type != "llava":
            return
        if missing:
            raise ConfigError(
                f"{self._part.weights} lacks {len(missing)} of the {len(shapes)} weights of the {part}, for example "
                f"{missing[0]}",
                expected=f"safetensors files with the whole {part}{self._pickles()}",
            )
        wrong = []
        for name, known in stored.items():
            with self._opened(known) as file:
                shape = torch.Size(file.get_slice(known).get_shape())
            if self._has_rows(name):
                shape = torch.Size((max(shape[0], self._num_tokens), *shape[1:]))
            if shape != shapes[name]:
                wrong.append(f"{known} is {tuple(shape)} instead of {tuple(shapes[name])}")
        if wrong:
            raise ConfigError(
                f"{self._part.weights} holds {len(wrong)} of the {len(shapes)} weights of the {part} in other shapes, "
                f"for example {wrong[0]}",
                expected=f"a {part} that fits the other parts",
            )

    def _stored_name(self, name: str) -> str:
        """The weight's name in the files; empty where they do not have it."""
        stored_as = self._model.stored_as.items()
        others = [name.replace(old, other, 1) for old, all_ in stored_as if name.startswith(old) for other in all_]
        # A name that is known may still be of values in another form, such as transposed ones.
        there = (key for key in (name, *others) if key in self._files and self._model.renamed(key))
        known = next(there, "") or self._published_names.get(name, "")
        if not known and name == HEAD and self._is_tied:
            return self._stored_name(self._model.embedding)
        return known

    def _has_rows(self, name: str) -> bool:
        return bool(self._model.embedding) and name in (self._model.embedding, HEAD)

    @cached_property
    def _published_names(self) -> dict[str, str]:
        """Names of the current release -> those in the files."""
        return {self._model.renamed(stored): stored for stored in self._files}

    @cached_property
    def _whole(self) -> dict[str, Tensor]:
        assert self._model.kind, "stored in larger models only, whose files are known"
        return dict(load_complete(self._model.kind, self._part, **self._loading).state_dict())

    @cached_property
    def _files(self) -> dict[str, str]:
        """Tensor -> name of its safetensors file; empty where the weights are stored in another form."""
        if self._source.has(SAFE_WEIGHTS_NAME):
            with self._source.opened(SAFE_WEIGHTS_NAME) as file:
                return dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
        if index := self._source.index():
            return read_index(index)
        return {}

    @cached_property
    def _source(self) -> WeightFiles:
        return weight_files(self._part)

    def _opened(self, stored_name: str) -> safe_open | RangedFile:
        file = self._files[stored_name]
        if not self._source.has(file):
            raise ConfigError(
                f"{self._part.weights} has no {file}, which its {SAFE_WEIGHTS_INDEX_NAME} names",
                fix="download the model again",
            )
        return self._source.opened(file)

    def _pickles(self) -> str:
        """Says that there are weights that are not read."""
        pickles = [name for name in PICKLES if self._source.has(name)]
        return f"; {pickles[0]} is a pickle, which may run code when it is read, and is not read" if pickles else ""


class DrawnWeights:
    """Random weights. Each depends on all drawn before it, so the first `read` builds the model and keeps it."""

    def __init__(self, draw: Callable[[], Mapping[str, Tensor]]) -> None:
        self._drawn = cache(draw)

    def read(self, name: str) -> Tensor:
        return self._drawn()[name]


def _with_rows(stored: RangedTensor | Tensor, shape: Sequence[int], count: int) -> Tensor:
    """A matrix in fp32 with rows for the tokenizer's additional tokens: the mean of all rows. stored: gives its rows by
    slices, of which one is held at a time, because embeddings are the largest weights.

    The mean is computed in double precision, so that it does not depend on the number of threads.
    """
    rows, width = shape
    weight = torch.empty(max(rows, count), width)
    total = torch.zeros(width, dtype=torch.float64)
    for start in range(0, rows, ROWS_AT_ONCE):
        part = stored[start : start + ROWS_AT_ONCE].float()
        weight[start : start + len(part)] = part
        total += part.double().sum(dim=0)
    weight[rows:] = total / rows
    return weight


def fill(module: nn.Module, weights: Weights) -> None:
    """Copy weights into a module, one at a time."""
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(weights.read(name))
