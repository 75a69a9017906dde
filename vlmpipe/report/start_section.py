"""Scores before and after training: on validation questions, by slice, and on the retention probe."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpipe.trainer.records.evaluation import Evaluation, Retention, StartScores, StartSlice

SHOWN_SLICES = 20  # those with the most answers changed
PROBE = "retention probe"
SHOWN = {"benchmarks": "answered right", "agreement": "answered as before"}


@dataclass(frozen=True)
class StartRow:
    """Right answers of the start weights and of the trained ones to the same questions.

    interval: of the difference; of the two whole sets each end is wrong in 5 % of cases, of parts it is of 95 %.
    """

    part: str
    questions: int
    images: int
    before: float
    after: float
    interval: tuple[float, float]
    verdict: str = ""
    p_corrected: float | None = None

    @property
    def difference(self) -> float:
        return self.after - self.before


def start_rows(evaluation: Evaluation) -> list[StartRow]:
    """All questions first, then slices, then the probe and its parts; empty where the start weights were not asked."""
    start = evaluation.start
    if start is None or start.before is None:
        return []
    slices = [_row(f"{part.field}: {part.name}" if part.field else part.name, part) for part in start.slices]
    return [*_whole("validation questions", start), *slices[:SHOWN_SLICES], *_probe(start.retention)]


def start_notes(evaluation: Evaluation) -> list[str]:
    """Return sentences on what the rows lack."""
    start = evaluation.start
    if start is None:
        return []
    left, notes = len(start.slices) - SHOWN_SLICES, list[str]()
    if start.obstacle:
        notes.append(f"The start weights were not asked: {start.obstacle}.")
    if start.retention and start.retention.obstacle:
        notes.append(f"No retention probe: {start.retention.obstacle}.")
    if left > 0:
        notes.append(f"{left:,} more slices with fewer changed answers are in evaluate.json.")
    return notes


def _probe(probe: Retention | None) -> list[StartRow]:
    if probe is None or probe.before is None:
        return []
    parts = [_row(f"{PROBE}: {part.name}", part) for part in probe.parts]
    return [*_whole(f"{PROBE}, {SHOWN[probe.form]}", probe), *(parts if len(parts) > 1 else [])]


def _row(name: str, part: StartSlice) -> StartRow:
    return StartRow(
        part=name,
        questions=part.questions,
        images=part.images,
        before=part.before,
        after=part.after,
        interval=part.interval,
        verdict=part.verdict,
        p_corrected=part.p_corrected,
    )


def _whole(part: str, scores: StartScores | Retention) -> list[StartRow]:
    assert scores.before is not None and scores.after is not None and scores.interval
    return [StartRow(part, scores.questions, scores.images, scores.before, scores.after, scores.interval)]
