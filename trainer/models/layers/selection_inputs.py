"""Host-side inputs with which a training module selects tokens of packed sequences."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, eq=False)
class Selectable:
    """The images and questions of one packed sequence."""

    is_question: NDArray[np.bool_]  # (sequence_length,) tokens before a sample's first answer, without images and marks
    grids: tuple[tuple[int, int], ...]  # rows and columns of tokens of each image, before selection
    slots: tuple[int, ...]  # image tokens in the sequence for each image: the most that may be kept
    seed: int  # of selections drawn in training


@dataclass(frozen=True, eq=False)
class SelectionInputs:
    """Inputs of selection in one forward pass. Numbers samples over all sequences, tokens in the flattened ones."""

    question_index: Tensor  # (question tokens,)
    question_samples: Tensor  # (question tokens,) sample of each
    label_samples: Tensor  # (labels,) sample of each label
    image_samples: tuple[int, ...]  # sample of each image
    grids: tuple[tuple[int, int], ...]
    slots: tuple[int, ...]
    seeds: tuple[int, ...]  # of each image
    sample_tokens: tuple[tuple[int, ...], ...]  # of the samples of each sequence, with all slots

    @property
    def num_samples(self) -> int:
        return sum(map(len, self.sample_tokens))

    @property
    def image_tokens(self) -> int:
        """The tokens of all images, before selection."""
        return sum(rows * columns for rows, columns in self.grids)

    def sample_tokens_with(self, selections: Sequence[Sized]) -> list[list[int]]:
        """Return the tokens of each sequence's samples, with the kept tokens of each image instead of all slots."""
        left_over = [0] * self.num_samples
        for sample, most, selection in zip(self.image_samples, self.slots, selections, strict=True):
            left_over[sample] += most - len(selection)
        unused = iter(left_over)
        return [[count - next(unused) for count in row] for row in self.sample_tokens]

    def to(self, device: torch.device, *, non_blocking: bool = False) -> SelectionInputs:
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=non_blocking) for name in TENSORS})

    def pin_memory(self) -> SelectionInputs:
        return replace(self, **{name: getattr(self, name).pin_memory() for name in TENSORS})


def marks_of(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Tokens that no question is made of: those of turns, images and padding."""
    added = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
    return sorted({*added, *tokenizer.all_special_ids})


TENSORS = ("question_index", "question_samples", "label_samples")
