"""Inputs of token selection in each micro-batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from vlmpipe.trainer.data.loader import PackedSequence
from vlmpipe.trainer.data.packing import Int64Array
from vlmpipe.trainer.models.layers.selection_inputs import SelectionInputs


def selection_inputs(sequences: Sequence[PackedSequence], label_index: Int64Array) -> SelectionInputs:
    """label_index: positions before those of labels, in the flattened sequences."""
    length = len(sequences[0].input_ids)
    selectable = [sequence.selectable for sequence in sequences if sequence.selectable is not None]
    ends = np.concatenate(
        [n * length + np.cumsum(sequence.sample_tokens, dtype=np.int64) for n, sequence in enumerate(sequences)]
    )
    question_index = np.flatnonzero(np.concatenate([sequence.is_question for sequence in selectable]))
    images = [count for sequence in sequences for count in sequence.sample_images]
    return SelectionInputs(
        question_index=torch.from_numpy(question_index),
        question_samples=torch.from_numpy(np.searchsorted(ends, question_index, side="right")),
        label_samples=torch.from_numpy(np.searchsorted(ends, label_index + 1, side="right")),
        image_samples=tuple(itertools.chain.from_iterable([number] * count for number, count in enumerate(images))),
        grids=tuple(grid for sequence in selectable for grid in sequence.grids),
        slots=tuple(count for sequence in selectable for count in sequence.slots),
        seeds=tuple(sequence.seed + place for sequence in selectable for place in range(len(sequence.slots))),
        sample_tokens=tuple(sequence.sample_tokens for sequence in sequences),
    )
