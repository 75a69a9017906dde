"""The mean of training's questions, from which the relevance module sees each one.

A question is the mean of its tokens' embeddings, and most of its tokens are those of every question: of one about a
colour, nine tenths. Seen from their mean, what is left is what distinguishes it. Only with
model.relevance.centre_questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vlmpipe.trainer.features.relevance.module import PREFIX, pooled
from vlmpipe.trainer.models.base import Weights
from vlmpipe.trainer.models.layers.selection_inputs import Selectable

NAME = f"{PREFIX}question_centre"


class Questions(Protocol):
    """Fields of a packed sequence that are read."""

    @property
    def input_ids(self) -> NDArray[np.int64]: ...
    @property
    def selectable(self) -> Selectable | None: ...
    @property
    def sample_tokens(self) -> tuple[int, ...]: ...


class WithCentre:
    """Weights with a question centre. A `vlmpipe.trainer.models.base.Weights`."""

    def __init__(self, base: Weights, centre: Tensor) -> None:
        self._base, self._centre = base, centre

    def read(self, name: str) -> Tensor:
        return self._centre if name == NAME else self._base.read(name)


def lacks_centre(model: nn.Module, deferred: Weights | None) -> bool:
    """Return whether the model's relevance learns from questions and has not seen any. deferred: values of its
    parameters.
    """
    centre = dict(model.named_parameters()).get(NAME)
    if centre is None or not centre.requires_grad:
        return False
    return not (deferred.read(NAME) if deferred else centre.detach()).any()


@torch.no_grad()
def centre_questions(model: nn.Module, deferred: Weights | None, sequences: Sequence[Questions]) -> Weights | None:
    """Set the centre to the mean question of these packed sequences. Returns `deferred` with the centre, if given."""
    table = model.get_input_embeddings().weight
    if deferred:
        name = next(name for name, weight in model.named_parameters() if weight is table)
        table = deferred.read(name)
    centre = mean_question(table, sequences)
    if deferred:
        return WithCentre(deferred, centre)
    model.get_parameter(NAME).copy_(centre)
    return None


def mean_question(table: Tensor, sequences: Sequence[Questions]) -> Tensor:
    """(width,) in fp32, on the table's device. table: (tokens, width) the embeddings."""
    ids, owners, first = list[int](), list[int](), 0
    for sequence in sequences:
        if sequence.selectable is None:
            continue
        places = np.flatnonzero(sequence.selectable.is_question)
        ids += np.asarray(sequence.input_ids)[places].tolist()
        owners += (first + np.searchsorted(np.cumsum(sequence.sample_tokens), places, side="right")).tolist()
        first += len(sequence.sample_tokens)
    numbers = torch.tensor(sorted(set(owners)), device=table.device)  # a sample may have no question
    if not len(numbers):
        return torch.zeros(table.shape[1], device=table.device)
    questions = pooled(table[torch.tensor(ids, device=table.device)], torch.tensor(owners, device=table.device), first)
    return questions[numbers].mean(0)
