"""Different answers to the same question about the same image or a copy of it."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.audit.catalogue import Catalogue
from vlmpipe.trainer.audit.findings import Finding, Flagged, collected
from vlmpipe.trainer.audit.repeated_images import flag

MAX_SHORT_CHARACTERS = 24  # of an answer: longer ones to an open question differ without a contradiction
CLOSED_SHARE = 0.5  # distinct answers of a question by its uses, below which long answers are compared too


def contradictions(catalogue: Catalogue, groups: NDArray[np.int64]) -> Finding:
    """Samples whose first answer differs from another's to the same question about the same images, copies included.

    Excluded: the answers that fewer samples give; all where none is given by more than half.
    """
    turns = catalogue.turns
    asked = np.flatnonzero((turns["question"] != 0) & (turns["turn"] == 0))
    keys = _image_keys(catalogue, groups)
    asked = asked[keys[turns["sample"][asked]] != 0]
    pairs = np.stack([turns["question"][asked], keys[turns["sample"][asked]]], axis=1)
    _, of_pair, counts = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    of_pair = of_pair.reshape(-1)
    order = np.argsort(of_pair, kind="stable")
    ends = np.cumsum(counts)
    is_closed = _closed(turns, asked)
    flagged: list[Flagged] = []
    number, is_open = 0, 0
    for pair in np.flatnonzero(counts > 1).tolist():
        rows = asked[order[ends[pair] - counts[pair] : ends[pair]]]
        answers = Counter(turns["answer"][rows].tolist())
        if len(answers) < 2:
            continue
        if not (turns["question"][rows[0]] in is_closed or (turns["characters"][rows] <= MAX_SHORT_CHARACTERS).all()):
            is_open += 1
            continue
        number += 1
        ((best, times), *_) = answers.most_common(1)
        right = best if times > len(rows) / 2 else None
        for answer_row in rows.tolist():
            is_right = turns["answer"][answer_row] == right
            detail = f"{len(answers)} different answers to this question about this image in {len(rows)} samples"
            flagged.append(
                flag(
                    catalogue,
                    int(turns["sample"][answer_row]),
                    "contradiction",
                    detail + ("; most samples give this one" if is_right else ""),
                    number,
                    len(rows),
                    excluded=not is_right,
                )
            )
    later = int((turns["turn"] > 0).sum())
    left_out = [
        f"long answers to {is_open:,} open questions, such as captions, were not compared" if is_open else "",
        f"{later:,} answers of later turns, which depend on the turns before them, were not compared" if later else "",
    ]
    advice = "correct the answers; those that fewer samples give are excluded, all where none is given by most"
    return collected(
        "contradiction", flagged, checked=len(asked), advice=advice, obstacle="; ".join(filter(None, left_out))
    )


def _image_keys(catalogue: Catalogue, groups: NDArray[np.int64]) -> NDArray[np.uint64]:
    """(samples,) equal numbers for equal images in order, copies taken for one; 0 without images."""
    units = np.where(groups > 0, groups, groups.max(initial=0) + 1 + np.arange(len(groups))).astype(np.uint64)
    keys = np.zeros(len(catalogue), np.uint64)
    uses = units[catalogue.image_rows] if len(catalogue.image_rows) else np.zeros(0, np.uint64)
    counts = np.diff(catalogue.first_use)
    for place in range(int(counts.max(initial=0))):
        has = counts > place
        values = uses[catalogue.first_use[:-1][has] + place]
        keys[has] = (keys[has] * np.uint64(0x9E3779B97F4A7C15)) ^ (
            values * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(1)
        )
    return keys


def _closed(turns: NDArray[np.void], asked: NDArray[np.int64]) -> set[int]:
    """Questions that have few distinct answers."""
    questions, answers = turns["question"][asked], turns["answer"][asked]
    named, uses = np.unique(questions, return_counts=True)
    distinct = np.unique(np.stack([questions, answers], axis=1), axis=0)[:, 0] if len(asked) else questions
    _, kinds = np.unique(distinct, return_counts=True)
    return set(named[kinds <= CLOSED_SHARE * uses].tolist())
