"""Samples whose answers the model gives without their images: the text alone predicts them."""

from __future__ import annotations

import numpy as np

from vlmpipe.trainer.audit.catalogue import Catalogue
from vlmpipe.trainer.audit.findings import Finding, Flagged, collected
from vlmpipe.trainer.audit.label_suspects import CheckedAnswers
from vlmpipe.trainer.audit.repeated_images import flag

MIN_PROBABILITY = 0.9  # of each of a sample's answers: by far more than the most frequent answer of most questions has


def predicted_by_text(catalogue: Catalogue, blank: CheckedAnswers, obstacle: str) -> Finding:
    """Samples with images of which every answer has this probability with blank images. None is excluded.

    blank: losses under the late checkpoint.
    """
    turns = catalogue.turns[blank.rows]
    is_known = (blank.nats[-1] <= -np.log(MIN_PROBABILITY)) & (blank.missed[-1] == 0)
    samples, of_sample = np.unique(turns["sample"], return_inverse=True)
    answers = np.bincount(of_sample, minlength=len(samples))
    known = np.bincount(of_sample, weights=is_known, minlength=len(samples))
    has_images = catalogue.first_use[samples + 1] > catalogue.first_use[samples]
    highest = np.zeros(len(samples))
    np.maximum.at(highest, of_sample, blank.nats[-1])
    flagged: list[Flagged] = []
    for place in np.flatnonzero((known == answers) & has_images).tolist():
        probability = float(np.exp(-highest[place]))
        detail = f"answered without the image with probability {probability:.0%}"
        flagged.append(flag(catalogue, int(samples[place]), "text_alone", detail, score=probability))
    advice = "ask so that the image decides, or leave them out of the validation split: they count as right for nothing"
    return collected("text_alone", flagged, checked=int(has_images.sum()), advice=advice, obstacle=obstacle)
