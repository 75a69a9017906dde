"""Findings of `vlmpipe doctor`: a row for each question, and the decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from vlmpipe.trainer.errors import ExitCode

State = Literal["ok", "missing", "cannot see"]
STATES: tuple[State, ...] = ("missing", "cannot see", "ok")


@dataclass(frozen=True)
class Row:
    """The answer to one question.

    Attributes:
        fix: the commands that mend it, or that let it be seen, one a line.
        shows: assumptions (catalog/unproved.yaml) that the service's answer confirms or contradicts.
    """

    subject: str
    state: State
    text: str
    fix: str = ""
    shows: tuple[tuple[str, bool], ...] = ()

    def showing(self, assumption: str, holds: bool) -> Row:
        """The row, with what it shows of an assumption."""
        return replace(self, shows=(*self.shows, (assumption, holds)))


def ok(subject: str, text: str) -> Row:
    """Something is as the run needs it."""
    return Row(subject, "ok", text)


def missing(subject: str, text: str, fix: str) -> Row:
    """The run would fail by it. `fix` is the command that mends it."""
    return Row(subject, "missing", text, fix)


def unseen(subject: str, text: str, fix: str = "") -> Row:
    """The question was not answered, and why."""
    return Row(subject, "cannot see", text, fix)


def exit_code(rows: Sequence[Row]) -> int:
    """NOT_READY where something is missing, UNAVAILABLE where nothing at all could be seen, and 0 otherwise."""
    states = {line.state for line in rows}
    if "missing" in states:
        return ExitCode.NOT_READY
    return ExitCode.UNAVAILABLE if states == {"cannot see"} else ExitCode.OK


def decision(rows: Sequence[Row]) -> str:
    """The first line that a person reads."""
    count = {state: sum(line.state == state for line in rows) for state in STATES}
    seen = f"{count['ok']} ok, {count['cannot see']} cannot be seen"
    if count["missing"]:
        return f"Not ready: {count['missing']} missing, {seen}."
    if not count["ok"]:
        return f"Not known: nothing could be seen ({count['cannot see']} questions)."
    if not count["cannot see"]:
        return f"Ready: {count['ok']} ok."
    return f"Nothing that can be seen is missing: {seen}."


def as_json(rows: Sequence[Row]) -> dict[str, object]:
    """All rows as one object."""
    return {
        "ok": exit_code(rows) == ExitCode.OK,
        "exit_code": int(exit_code(rows)),
        "decision": decision(rows),
        "counts": {state: sum(line.state == state for line in rows) for state in STATES},
        "rows": [{"subject": line.subject, "state": line.state, "text": line.text, "fix": line.fix} for line in rows],
    }
