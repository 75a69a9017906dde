"""Finds the cause of a failed run in its error messages and logs, and formats the diagnosis.

A cause counts before a consequence, and an exit code only where no text is recognised. Without either, the last lines
are shown instead of a guess.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from vlmpipe.runs.failure_patterns import Hit, Pattern, hits, patterns
from vlmpipe.runs.stack_dumps import Stall

LAST_LINES = 15
NOT_RECOGNISED = "not recognised"
# Patterns for which the ranks' stacks are read.
STALL_IDS = ("stalled", "collective-timeout")
_ENDED = re.compile(r"launcher: ranks ended in this order: (.*)")
_END = re.compile(r"rank (\d+) \(([^,]+), ([\dT:.-]+)\)")


@dataclass(frozen=True)
class RankEnd:
    """How and when one rank ended."""

    rank: int
    how: str  # "code 65" or "SIGKILL"
    at_s: float  # Unix seconds, by its own node's clock


@dataclass(frozen=True)
class Text:
    """An error message or a log of the run, and where it was found."""

    where: str
    text: str
    first_line: int = 1  # of `text` in it; 0 where lines have no numbers


@dataclass(frozen=True)
class Diagnosis:
    """Cause of a run's end. `pattern` is None where nothing is recognised, and for a run that did not fail."""

    run: str
    outcome: str  # running | done | stopped | failed
    step: str
    exit_code: int | None
    pattern: Pattern | None
    hit: Hit | None
    also: tuple[str, ...]  # consequences and other things that were recognised
    ends: tuple[RankEnd, ...]
    stall: Stall | None
    notes: tuple[str, ...]
    last_lines: tuple[str, ...]
    command: str  # continues the run; a sentence where its run file is not known

    @property
    def cause(self) -> str:
        """One sentence."""
        if self.outcome == "done":
            return "nothing: the run is done"
        if self.outcome == "running":
            return "nothing yet: the run is still running"
        if self.pattern is None:
            return f"{NOT_RECOGNISED}: exit code {self.exit_code}" if self.exit_code else NOT_RECOGNISED
        detail = self.hit.detail if self.hit else ""
        return f"{self.pattern.cause}: {detail}" if detail else self.pattern.cause

    def lines(self) -> list[str]:
        """For people."""
        code = f" with exit code {self.exit_code}" if self.exit_code else ""
        where = f" in step {self.step}" if self.step else ""
        lines = [f"run {self.run}: {self.outcome}{where}{code}", f"  cause:     {self.cause}"]
        if self.hit:
            lines.append(f"  seen in:   {self.hit.place}: {self.hit.text[:200]}")
        if self.ends:
            lines.append(f"  first:     {_first_to_end(self.ends)}")
        if self.stall:
            lines += [f"  stacks:    {line}" for line in self.stall.lines()]
        lines += [f"  besides:   {text}" for text in self.also]
        lines += [f"  note:      {note}" for note in self.notes]
        if self.last_lines:
            lines += ["  the last lines that were printed:", *(f"    {line}" for line in self.last_lines)]
        if self.pattern:
            lines.append(f"  to do:     {self.pattern.remedy_in(self.step)}")
        elif self.outcome in ("failed", "stopped"):
            lines.append("  to do:     read the log above; VLMPIPE_DEBUG=1 adds tracebacks to errors")
        if self.command and self.outcome in ("failed", "stopped"):
            lines.append(f"  continue:  {self.command}")
        return lines

    def as_json(self) -> dict[str, object]:
        """For programs."""
        hit, stall = self.hit, self.stall
        return {
            "run": self.run,
            "outcome": self.outcome,
            "step": self.step or None,
            "exit_code": self.exit_code,
            "recognised": self.pattern is not None,
            "id": self.pattern.id if self.pattern else None,
            "cause": self.cause,
            "remedy": self.pattern.remedy_in(self.step) if self.pattern else None,
            "seen": {"where": hit.where, "line": hit.line or None, "text": hit.text} if hit else None,
            "ended": [asdict(end) for end in self.ends],
            "stall": stall.as_json() if stall else None,
            "also": list(self.also),
            "notes": list(self.notes),
            "last_lines": list(self.last_lines),
            "command": self.command if self.command.startswith("vlmpipe ") else None,
        }


def decide(texts: Sequence[Text], code: int | None) -> tuple[Pattern | None, Hit | None, list[str]]:
    """The cause, where it was seen, and other recognised problems."""
    matches = _hits(texts)
    causes = [hit for hit in matches if hit.pattern.kind == "cause"]
    hits = [hit for hit in causes if code in hit.pattern.exit_codes] or causes
    by_code = next((pattern for pattern in patterns() if code in pattern.exit_codes), None)
    if hits:
        hit: Hit | None = hits[0]
    elif by_code:
        return by_code, None, _others(matches, by_code)
    else:
        hit = matches[0] if matches else None
    return (hit.pattern, hit, _others(matches, hit.pattern)) if hit else (None, None, [])


def warnings(texts: Sequence[Text]) -> list[str]:
    """Doubts about a finished run's model, each with its remedy."""
    by_pattern = {hit.pattern.id: hit for hit in reversed(_hits(texts)) if hit.pattern.kind == "warning"}
    return [f"{hit.pattern.cause} ({hit.place}): {hit.pattern.remedy}" for hit in by_pattern.values()]


def _hits(texts: Sequence[Text]) -> list[Hit]:
    return [
        hit if text.first_line else replace(hit, line=0)
        for text in texts
        for hit in hits(text.where, text.text, first_line=text.first_line)
    ]


def _others(matches: Sequence[Hit], chosen: Pattern) -> list[str]:
    others: dict[str, str] = {}
    for hit in matches:
        if hit.pattern.id != chosen.id:
            others.setdefault(hit.pattern.id, f"{hit.pattern.cause} ({hit.place})")
    return list(others.values())


def rank_ends(texts: Sequence[Text]) -> list[RankEnd]:
    """The ranks of the last attempt in the order in which they ended, from the launchers' logs."""
    ends = {}
    for text in texts:
        noted = _ENDED.findall(text.text)
        for rank, how, at in _END.findall(noted[-1]) if noted else ():
            ends[int(rank)] = RankEnd(int(rank), how, datetime.fromisoformat(at).replace(tzinfo=UTC).timestamp())
    return sorted(ends.values(), key=lambda end: end.at_s)


def _first_to_end(ends: Sequence[RankEnd]) -> str:
    first = ends[0]
    at = datetime.fromtimestamp(first.at_s, UTC)
    text = f"rank {first.rank} ended first ({first.how}, {at:%H:%M:%S} UTC)"
    if len(ends) > 1:
        text += f"; the next one, rank {ends[1].rank} ({ends[1].how}), {ends[1].at_s - first.at_s:.1f} s later"
    return text


def last_lines(texts: Sequence[Text]) -> tuple[str, ...]:
    logs = [text for text in texts if text.first_line] or list(texts)
    return tuple(line for line in logs[0].text.splitlines() if line.strip())[-LAST_LINES:] if logs else ()
