"""Phases of a run in which its store is away or its disk is full. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

STEPS, SAVED_EVERY = 6, 2


@dataclass(frozen=True)
class Phase:
    """What fails in a phase of a run: writes of these names from a step on, until an event has come so often."""

    names: str  # a regular expression
    from_step: int = SAVED_EVERY
    until: tuple[str, int] = ("failed save", 2)
    only: str = ""  # the method of the requests, if not those that write


PHASES = {
    "start": Phase(r"ATTEMPTS\.json", from_step=0, until=("end", 1)),
    "log": Phase(r"metrics\.jsonl|steps/train\.json|usage/", until=("step", 4)),
    "upload": Phase(r"\.distcp"),
    "manifest": Phase(r"node-0\.json"),
    "COMMIT": Phase(r"/COMMIT"),
    "after COMMIT": Phase(r"/LATEST", until=("step", 5)),
    "retention": Phase("", until=("step", 5), only="DELETE"),
    "last save": Phase(r"\.distcp|node-0\.json|/COMMIT", from_step=STEPS, until=("failed save", 2)),
    "end": Phase(r"summary\.json|metrics\.jsonl|steps/train\.json|usage/", from_step=STEPS, until=("wait", 2)),
}
