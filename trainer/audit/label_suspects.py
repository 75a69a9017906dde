"""Answers whose loss stays high under two checkpoints while that of similar samples falls: suspected wrong labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.audit.catalogue import Catalogue
from vlmpipe.trainer.audit.findings import Finding, Flagged, collected
from vlmpipe.trainer.audit.images.image_vectors import ImageVectors
from vlmpipe.trainer.audit.images.neighbours import Vectors, nearest
from vlmpipe.trainer.audit.repeated_images import flag

NEIGHBOURS = 12  # samples asked the same question whose images are nearest
MIN_NEIGHBOURS = 4  # below which all answers to the question stand for them
MIN_LOSS = 1.2  # nats: the model gives the label less than about a third of the probability
MIN_ABOVE = 1.0  # nats above the median of the neighbours, under each checkpoint
CONFIRMED_SHARE = 0.5  # of the neighbours' answers must be the most probable ones: the model has learned the question


@dataclass(frozen=True)
class CheckedAnswers:
    """Losses of answers under one or two checkpoints, the earlier one first.

    rows: (answers,) rows of Catalogue.turns. nats: (checkpoints, answers). missed: (checkpoints, answers) tokens that
    are not the most probable ones. steps: of the checkpoints.
    """

    rows: NDArray[np.int64]
    nats: NDArray[np.float32]
    missed: NDArray[np.int32]
    steps: tuple[int, ...]


def suspected_labels(catalogue: Catalogue, vectors: ImageVectors, checked: CheckedAnswers, obstacle: str) -> Finding:
    """The answers that the model gives another one instead of under each checkpoint, with a loss far above that of the
    nearest images that are asked the same question.
    """
    turns = catalogue.turns[checked.rows]
    around = _around(catalogue, vectors, turns)
    above = checked.nats - around.nats(checked.nats)
    late = len(checked.steps) - 1
    learned = around.share(checked.missed[late] == 0) >= CONFIRMED_SHARE
    is_suspect = (
        (checked.missed > 0).all(axis=0)
        & (checked.nats >= MIN_LOSS).all(axis=0)
        & (above >= MIN_ABOVE).all(axis=0)
        & learned
    )
    flagged: list[Flagged] = []
    for place in np.flatnonzero(is_suspect).tolist():
        losses = ", ".join(
            f"{nats:.1f} at step {step:,}" for nats, step in zip(checked.nats[:, place], checked.steps, strict=True)
        )
        usual = float(around.nats(checked.nats)[late, place])
        detail = f"loss {losses} (nats); similar samples have {usual:.2f}"
        sample, turn = int(turns["sample"][place]), int(turns["turn"][place])
        score = float(above[:, place].min())
        flagged.append(flag(catalogue, sample, "suspected_label", detail, score=score, turn=turn, excluded=True))
    advice = "look at them and correct the labels; hard samples are among them"
    return collected("suspected_label", flagged, checked=len(turns), advice=advice, obstacle=obstacle)


@dataclass(frozen=True)
class _Around:
    """Neighbours of each answer: (answers, k) places among the answers, -1 for none."""

    places: NDArray[np.int64]

    def nats(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """(checkpoints, answers) median of the neighbours' losses."""
        picked = np.where(self.places >= 0, values[:, self.places], np.nan)
        return np.nanmedian(picked, axis=2).astype(np.float32)

    def share(self, values: NDArray[np.bool_]) -> NDArray[np.float64]:
        """(answers,) share of the neighbours for which this is true."""
        there = self.places >= 0
        shares: NDArray[np.float64] = (values[self.places] & there).sum(axis=1) / np.maximum(1, there.sum(axis=1))
        return shares


def _around(catalogue: Catalogue, vectors: ImageVectors, turns: NDArray[np.void]) -> _Around:
    """The nearest answers to the same question; answers to rare questions have all others for neighbours."""
    by_image = vectors.features if vectors.features is not None else vectors.bits
    row_of_image = np.full(len(catalogue.images), -1, np.int64)
    row_of_image[vectors.rows] = np.arange(len(vectors.rows))
    owners = catalogue.first_use[turns["sample"]]
    has_image = catalogue.first_use[turns["sample"] + 1] > owners
    rows = np.full(len(turns), -1, np.int64)
    rows[has_image] = row_of_image[catalogue.image_rows[owners[has_image]]]
    places = np.full((len(turns), NEIGHBOURS), -1, np.int64)
    order = np.argsort(turns["question"], kind="stable")
    _, starts = np.unique(turns["question"][order], return_index=True)
    rare: list[NDArray[np.int64]] = []
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        members = order[start:end]
        if len(members) > MIN_NEIGHBOURS:
            _fill(places, members, by_image, rows)
        else:
            rare.append(members)
    if rare:
        _fill(places, np.sort(np.concatenate(rare)), by_image, rows)
    return _Around(places)


def _fill(places: NDArray[np.int64], members: NDArray[np.int64], by_image: Vectors, rows: NDArray[np.int64]) -> None:
    vectors = by_image[np.maximum(rows[members], 0)] * (rows[members] >= 0)[:, None]
    near = nearest(np.ascontiguousarray(vectors), NEIGHBOURS).rows
    places[members, : near.shape[1]] = np.where(near >= 0, members[near], -1)
