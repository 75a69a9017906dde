"""Suspected wrong labels: answers unlike those of near images, or whose loss stays high while theirs falls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.audit.catalogue import Catalogue
from vlmpipe.trainer.audit.findings import Finding, Flagged, collected
from vlmpipe.trainer.audit.images.image_vectors import ImageVectors
from vlmpipe.trainer.audit.images.search import max_compared, search
from vlmpipe.trainer.audit.repeated_images import flag

NEIGHBOURS = 12  # samples asked the same question whose images are nearest
MIN_NEIGHBOURS = 4  # below which all answers to the question stand for them
MIN_LOSS = 1.2  # nats: the model gives the label less than about a third of the probability
MIN_ABOVE = 1.0  # nats above the median of the neighbours, in the mean of the checkpoints
CONFIRMED_SHARE = 0.5  # of the neighbours' answers, and of validation answers, must be the most probable ones
MIN_VALIDATION = 10  # validation answers of a question, below which all rare questions are counted together
VOTERS = 8  # nearest images with the same question
MAX_OWN, MIN_OTHER = 1 / 8, 5 / 8  # of them have this label, or another one: a copy of the sample may be among them
MIN_AGREEMENT = 0.7  # of a question's answers are those of most of their neighbours


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


def suspected_labels(
    catalogue: Catalogue, vectors: ImageVectors, checked: CheckedAnswers | None, obstacle: str
) -> Finding:
    """The answers that speak against the nearest images with the same question, by their labels or by their losses.

    By labels, where nearest images mostly have equal ones: next to none of them has this label, and most have one
    other. By losses, where the model has learned what holds for validation samples: the answer is not the most probable
    one under each checkpoint, and loses far more than the neighbours'. Where both can be judged both must agree, but
    for an answer that is voted down and not the most probable one of the late checkpoint.

    checked: None without a run, where labels alone are judged.
    """
    rows = np.arange(len(catalogue.turns)) if checked is None else checked.rows
    turns = catalogue.turns[rows]
    around = _around(catalogue, vectors, turns)
    votes = _votes(turns, around)
    is_suspect, above, left_out = votes.is_against, np.zeros(len(turns)), ""
    usual = np.zeros((1, len(turns)), np.float32)
    if checked is not None:
        usual = around.nats(checked.nats)
        above, by_losses, left_out = _judged_by_losses(catalogue, turns, around, checked, usual)
        is_suspect = (is_suspect & (checked.missed[-1] > 0)) | (by_losses & (~votes.is_judged | votes.is_alone))
    flagged: list[Flagged] = []
    for place in np.flatnonzero(is_suspect).tolist():
        details = []
        if votes.is_against[place]:
            share = f"{votes.other[place]:.0%} of the {VOTERS} nearest images with this question"
            details.append(f"{share} have one other answer, {votes.equal[place]:.0%} this one")
        if checked is not None:
            losses = ", ".join(
                f"{nats:.1f} at step {step:,}" for nats, step in zip(checked.nats[:, place], checked.steps, strict=True)
            )
            details.append(f"loss {losses} (nats); similar samples have {usual[-1, place]:.2f}")
        sample, turn = int(turns["sample"][place]), int(turns["turn"][place])
        score = float(above[place] + votes.other[place])
        flagged.append(
            flag(catalogue, sample, "suspected_label", "; ".join(details), score=score, turn=turn, excluded=True)
        )
    left = [obstacle, left_out, *_not_judged(votes, around)]
    advice = "look at them and correct the labels; hard samples are among them"
    return collected(
        "suspected_label", flagged, checked=len(turns), advice=advice, obstacle="; ".join(filter(None, left))
    )


def _not_judged(votes: _Votes, around: _Around) -> Iterator[str]:
    judged, answers, alone = (
        int(votes.is_judged.sum()),
        len(votes.is_judged),
        int((around.places < 0).all(axis=1).sum()),
    )
    if judged < answers:
        text = f"neighbours' labels judged {judged:,} of {answers:,} answers: elsewhere near images differ in them, "
        yield f"{text}or fewer than {VOTERS} other images have the question"
    if alone:
        yield f"{alone:,} answers were compared with no others: there are none, or their images were not compared"


def _judged_by_losses(
    catalogue: Catalogue,
    turns: NDArray[np.void],
    around: _Around,
    checked: CheckedAnswers,
    usual: NDArray[np.float32],
) -> tuple[NDArray[np.float64], NDArray[np.bool_], str]:
    """(answers,) losses above the neighbours', summed over checkpoints; suspects; what was not judged."""
    above = (checked.nats - usual).sum(axis=0)
    late = checked.missed[-1]
    is_learned = _is_learned(catalogue, turns, late == 0)
    is_suspect = (
        (checked.missed > 0).all(axis=0)
        & (checked.nats[-1] >= MIN_LOSS)
        & (above >= MIN_ABOVE * len(checked.steps))
        & (around.share(late == 0) >= CONFIRMED_SHARE)
        & is_learned
    )
    not_judged = int((~is_learned).sum())
    text = f"losses did not judge {not_judged:,} of {len(turns):,} answers: to their questions the model gives fewer "
    return above, is_suspect, f"{text}than {CONFIRMED_SHARE:.0%} of validation answers" if not_judged else ""


def _is_learned(catalogue: Catalogue, turns: NDArray[np.void], is_exact: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """(answers,) whether the model gives enough of the validation answers to the question, or to all rare questions."""
    splits = np.array([split.name == "eval" for split in catalogue.splits])
    is_validation = splits[np.searchsorted(catalogue.starts, turns["sample"], side="right") - 1]
    _, of_question = np.unique(turns["question"], return_inverse=True)
    asked = np.bincount(of_question, weights=is_validation)
    of_question = np.where(asked[of_question] >= MIN_VALIDATION, of_question, len(asked))
    asked = np.bincount(of_question, weights=is_validation, minlength=len(asked) + 1)
    exact = np.bincount(of_question, weights=is_validation & is_exact, minlength=len(asked))
    shares = np.divide(exact, asked, out=np.zeros_like(exact), where=asked > 0)
    learned: NDArray[np.bool_] = shares[of_question] >= CONFIRMED_SHARE
    return learned


@dataclass(frozen=True)
class _Votes:
    """(answers,) shares of the VOTERS nearest images that have this answer, and that have the most frequent other one.

    is_judged: near images with this question mostly have equal answers.
    """

    equal: NDArray[np.float64]
    other: NDArray[np.float64]
    is_judged: NDArray[np.bool_]

    @property
    def is_alone(self) -> NDArray[np.bool_]:
        alone: NDArray[np.bool_] = self.equal <= MAX_OWN
        return alone

    @property
    def is_against(self) -> NDArray[np.bool_]:
        return self.is_judged & self.is_alone & (self.other >= MIN_OTHER)


def _votes(turns: NDArray[np.void], around: _Around) -> _Votes:
    places = around.places[:, :VOTERS]
    same_question = (places >= 0) & (turns["question"][places] == turns["question"][:, None])
    has_voters = same_question.all(axis=1) & (turns["question"] != 0) & around.by_image
    labels, label = turns["answer"][places], turns["answer"][:, None]
    equal = (labels == label).mean(axis=1)
    matches = (labels[:, :, None] == labels[:, None, :]).sum(axis=2)
    other = np.where(labels == label, 0, matches).max(axis=1) / VOTERS
    _, of_question = np.unique(turns["question"], return_inverse=True)
    agrees = np.bincount(of_question, weights=has_voters & (equal > other))
    voted = np.bincount(of_question, weights=has_voters)
    shares = np.divide(agrees, voted, out=np.zeros_like(agrees), where=voted > 0)
    return _Votes(equal, other, has_voters & (shares[of_question] >= MIN_AGREEMENT))


@dataclass(frozen=True)
class _Around:
    """Neighbours of each answer. places: (answers, k) among the answers, -1 for none. by_image: (answers,) whether
    they are those with the nearest images."""

    places: NDArray[np.int64]
    by_image: NDArray[np.bool_]

    def nats(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """(checkpoints, answers) median of the neighbours' losses."""
        medians = np.full(values.shape, np.nan, np.float32)  # of answers without neighbours
        has_some = (self.places >= 0).any(axis=1)
        places = self.places[has_some]
        medians[:, has_some] = np.nanmedian(np.where(places >= 0, values[:, places], np.nan), axis=2)
        return medians

    def share(self, values: NDArray[np.bool_]) -> NDArray[np.float64]:
        """(answers,) share of the neighbours for which this is true."""
        there = self.places >= 0
        shares: NDArray[np.float64] = (values[self.places] & there).sum(axis=1) / np.maximum(1, there.sum(axis=1))
        return shares


def _around(catalogue: Catalogue, vectors: ImageVectors, turns: NDArray[np.void]) -> _Around:
    """The nearest answers to the same question; answers to rare questions have all others for neighbours.

    Answers about no image have those after them; answers about images that were not compared have none.
    """
    by_image = vectors.features if vectors.features is not None else vectors.bits
    row_of_image = np.full(len(catalogue.images), -1, np.int64)
    row_of_image[vectors.rows] = np.arange(len(vectors.rows))
    owners = catalogue.first_use[turns["sample"]]
    has_image = catalogue.first_use[turns["sample"] + 1] > owners
    rows = np.full(len(turns), -1, np.int64)
    rows[has_image] = row_of_image[catalogue.image_rows[owners[has_image]]]
    around = _Around(np.full((len(turns), NEIGHBOURS), -1, np.int64), rows >= 0)
    for members in _by_question(turns, np.flatnonzero(rows >= 0)):
        compared = members[: max_compared()]
        near = search(by_image[rows[compared]], NEIGHBOURS).rows
        around.places[compared, : near.shape[1]] = np.where(near >= 0, compared[near], -1)
    for members in _by_question(turns, np.flatnonzero(~has_image)):
        after = np.arange(1, min(NEIGHBOURS, len(members) - 1) + 1)
        around.places[members, : len(after)] = members[(np.arange(len(members))[:, None] + after) % len(members)]
    return around


def _by_question(turns: NDArray[np.void], chosen: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the chosen answers of each question, in order, those of rare questions together."""
    order = chosen[np.argsort(turns["question"][chosen], kind="stable")]
    _, starts = np.unique(turns["question"][order], return_index=True)
    rare: list[NDArray[np.int64]] = []
    for members in np.split(order, starts[1:]):
        if len(members) > MIN_NEIGHBOURS:
            yield members
        else:
            rare.append(members)
    if len(order) and rare:
        yield np.sort(np.concatenate(rare))
