"""Samples whose answers the model gives without their images, where their questions decide them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.audit.catalogue import Catalogue
from vlmpipe.trainer.audit.findings import Finding, Flagged, collected
from vlmpipe.trainer.audit.label_suspects import CheckedAnswers
from vlmpipe.trainer.audit.repeated_images import flag

MIN_PROBABILITY = 0.9  # of each of a sample's answers: by far more than the most frequent answer of most questions has


def predicted_by_text(catalogue: Catalogue, blank: CheckedAnswers, obstacle: str) -> Finding:
    """Samples with images of which every answer has this probability with blank images. None is excluded.

    At least one answer must be decided by its question. A question with several answers gets one guess without an
    image, right as often as that answer occurs, which is no evidence; neither is the most frequent answer of all.

    blank: losses under the late checkpoint.
    """
    turns = catalogue.turns[blank.rows]
    is_known = (blank.nats[-1] <= -np.log(MIN_PROBABILITY)) & (blank.missed[-1] == 0)
    samples, of_sample = np.unique(turns["sample"], return_inverse=True)
    answers = np.bincount(of_sample, minlength=len(samples))
    known = np.bincount(of_sample, weights=is_known, minlength=len(samples))
    decided = np.bincount(of_sample, weights=_decided_by_question(catalogue)[blank.rows], minlength=len(samples))
    has_images = catalogue.first_use[samples + 1] > catalogue.first_use[samples]
    highest = np.zeros(len(samples))
    np.maximum.at(highest, of_sample, blank.nats[-1])
    is_predicted = (known == answers) & has_images
    flagged: list[Flagged] = []
    for place in np.flatnonzero(is_predicted & (decided > 0)).tolist():
        probability = float(np.exp(-highest[place]))
        detail = f"answered without the image with probability {probability:.0%}"
        flagged.append(flag(catalogue, int(samples[place]), "text_alone", detail, score=probability))
    is_long = np.bincount(of_sample, weights=turns["question"] == 0, minlength=len(samples)) > 0
    undecided = is_predicted & (decided == 0)
    guessed, long = int((undecided & ~is_long).sum()), int((undecided & is_long).sum())
    left_out = []
    if guessed:
        text = f"{guessed:,} samples are answered by one guess for their question, or by the answer that is most "
        left_out.append(f"{text}frequent: no evidence, not listed")
    if long:
        left_out.append(f"{long:,} samples have questions too long to compare with others: not listed")
    advice = "ask so that the image decides, or leave them out of the validation split: they count as right for nothing"
    advice += "; training samples may be learned by heart"
    return collected(
        "text_alone",
        flagged,
        checked=int(has_images.sum()),
        advice=advice,
        obstacle="; ".join(filter(None, [obstacle, *left_out])),
    )


def _decided_by_question(catalogue: Catalogue) -> NDArray[np.bool_]:
    """(turns,) whether nearly all answers to a turn's question are this one, and it is not the most frequent of all.

    Of every turn, later ones by their own question too; False of questions that are too long to be compared.
    """
    turns = catalogue.turns
    if not len(turns):
        return np.zeros(0, np.bool_)
    pairs = np.stack([turns["question"], turns["answer"]], axis=1)
    _, of_pair, counts = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    _, of_question, uses = np.unique(turns["question"], return_inverse=True, return_counts=True)
    share = counts[of_pair.reshape(-1)] / uses[of_question]
    values, times = np.unique(turns["answer"], return_counts=True)
    is_decided: NDArray[np.bool_] = (
        (turns["question"] != 0) & (share >= MIN_PROBABILITY) & (turns["answer"] != values[times.argmax()])
    )
    return is_decided
