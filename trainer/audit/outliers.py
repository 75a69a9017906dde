"""Answers of another length or script than nearly all others of their source."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.audit.catalogue import Catalogue
from vlmpipe.trainer.audit.findings import Finding, Flagged, collected
from vlmpipe.trainer.audit.repeated_images import flag
from vlmpipe.trainer.audit.scripts import NONE, SCRIPTS, script_name

MIN_ANSWERS = 50  # of a source, below which nothing is usual
MAX_DEVIATIONS = 6.0  # of the logarithm of a length, in robust standard deviations
MIN_DEVIATION = 0.2  # of that logarithm: answers of one length have none
MAIN_SHARE = 0.9  # of a source's answers with letters, from which their script is the usual one


def outliers(catalogue: Catalogue, sources: tuple[str, ...]) -> Finding:
    """Samples with such answers. sources: prefixes of ids; empty for a single one. None is excluded."""
    turns = catalogue.turns
    of_turn = _source_of_samples(catalogue, sources)[turns["sample"]]
    flagged: list[Flagged] = []
    for source in range(max(1, len(sources))):
        rows = np.flatnonzero(of_turn == source)
        if len(rows) < MIN_ANSWERS:
            continue
        usual, deviations = _deviations(turns["characters"][rows])
        script = _main_script(turns["script"][rows])
        for answer_row, deviation in zip(rows.tolist(), deviations.tolist(), strict=True):
            details = []
            if abs(deviation) > MAX_DEVIATIONS:
                details.append(
                    f"an answer of {turns['characters'][answer_row]:,} characters; half have {usual:g} or fewer"
                )
            script_found = int(turns["script"][answer_row])
            if script != NONE and script_found not in (NONE, script):
                details.append(
                    f"an answer in {script_name(script_found)}; nearly all others are in {script_name(script)}"
                )
            if details:
                sample, turn = int(turns["sample"][answer_row]), int(turns["turn"][answer_row])
                score = abs(deviation) + 10 * (len(details) > 1 or "characters" not in details[0])
                flagged.append(flag(catalogue, sample, "outlier", "; ".join(details), score=score, turn=turn))
    advice = "look at them: cut, pasted or untranslated answers are learned like others"
    return collected("outlier", flagged, checked=len(turns), advice=advice)


def _source_of_samples(catalogue: Catalogue, sources: tuple[str, ...]) -> NDArray[np.int64]:
    numbers = {name: number for number, name in enumerate(sources)}
    source_of = np.zeros(len(catalogue), np.int64)
    if sources:
        for split, start in zip(catalogue.splits, catalogue.starts, strict=False):
            for number, identity in enumerate(split.ids):
                source_of[start + number] = numbers.get(identity.partition("/")[0], 0)
    return source_of


def _deviations(characters: NDArray[np.int32]) -> tuple[float, NDArray[np.float64]]:
    """Median length, and each one's deviation in robust standard deviations of the logarithm."""
    logs = np.log1p(characters.astype(np.float64))
    middle = np.median(logs)
    spread = max(MIN_DEVIATION, 1.4826 * float(np.median(np.abs(logs - middle))))
    return float(np.median(characters)), (logs - middle) / spread


def _main_script(scripts: NDArray[np.uint16]) -> int:
    counts = np.bincount(scripts, minlength=len(SCRIPTS))
    counts[NONE] = 0
    main = int(counts.argmax())
    return main if counts.sum() and counts[main] >= MAIN_SHARE * counts.sum() else NONE
