"""The gate's answer: `decision.json`."""

from __future__ import annotations

from typing import ClassVar

from vlmpipe.trainer.records.record import Part, Record


class Check(Part):
    """One requirement and its result. `value` and `threshold` are None where there is no number."""

    name: str
    metric: str
    slice: str | None = None
    value: float | None = None
    threshold: float | None = None
    is_upper: bool = False  # the threshold: the value may not exceed it
    interval: tuple[float, float] | None = None  # of the compared difference; each end is wrong in 5 % of cases
    questions: int | None = None  # that both sides of a comparison were asked
    passed: bool
    why: str


class Champion(Part):
    """The model in use: its registry version, run, checkpoint and validation exact match."""

    version: int
    run_id: str
    checkpoint: str = ""
    exact_match: float | None = None


class Decision(Record):
    """Decision on a model that may replace the champion, with its checks; its numbers are finite."""

    FILE: ClassVar[str] = "decision.json"
    STEP: ClassVar[str] = "decide"

    accepted: bool
    reason: str
    checks: tuple[Check, ...] = ()
    champion: Champion | None = None
    run_sha256: str = ""  # of the run.json that the run had, without its submission
