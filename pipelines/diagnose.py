"""`vlmpipe diagnose`: from what a run left behind to a cause and a remedy.

Whatever is said is said by the run itself: the record of the step that failed first, then the logs of its replicas,
then the log of the whole pipeline. A cause is believed before a consequence, an exit code only where no text says more;
and where nothing is recognised, the last lines are shown instead of a guess.
"""

from __future__ import annotations

import re
import shlex
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipelines.chaos_report import read_chaos
from pipelines.failure_patterns import Hit, Pattern, hits, patterns
from pipelines.local_run import LOG, MARKER, is_running, read_marker
from pipelines.run_state import ATTEMPT_LINE, STOPPED, Step, read_json, read_state
from pipelines.run_summary import find_run
from pipelines.stacks import Stall, read_stall

LOG_BYTES = 4 << 20  # the end of each log: what ended a job is there
LAST_LINES = 15
WIDTH = 120
NOT_RECOGNISED = "not recognised"
# Where the ranks stand explains these.
STALL_IDS = ("stalled", "collective-timeout")
_ENDED = re.compile(r"launcher: ranks ended in this order: (.*)")
_END = re.compile(r"rank (\d+) \(([^,]+), ([\dT:.-]+)\)")
RUN_FILES = (MARKER, "run.json", "steps", "logs")


@dataclass(frozen=True)
class RankEnd:
    """How and when one rank ended."""

    rank: int
    how: str  # "code 65" or "SIGKILL"
    at_s: float  # Unix seconds, by its own node's clock


@dataclass(frozen=True)
class Text:
    """Something that the run said, and where."""

    where: str
    text: str
    first_line: int = 1


@dataclass(frozen=True)
class Diagnosis:
    """What ended a run. `pattern` is None where nothing is recognised, and where nothing went wrong."""

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
    command: str

    @property
    def cause(self) -> str:
        """One sentence."""
        if self.outcome == "done":
            return "nothing: the run is done"
        if self.outcome == "running":
            return "nothing yet: the run is going on"
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
            where = self.hit.where if self.hit.where.endswith(".json") else f"{self.hit.where}:{self.hit.line}"
            lines.append(f"  seen in:   {where}: {self.hit.text[:200]}")
        if self.ends:
            lines.append(f"  first:     {_first_to_end(self.ends)}")
        if self.stall:
            lines += [f"  stacks:    {line}" for line in self.stall.lines()]
        lines += [f"  besides:   {text}" for text in self.also]
        lines += [f"  note:      {note}" for note in self.notes]
        if self.last_lines:
            lines += ["  the last lines that were printed:", *(f"    {line}" for line in self.last_lines)]
        if self.pattern:
            lines += textwrap.wrap(
                self.pattern.remedy, WIDTH, initial_indent="  to do:     ", subsequent_indent=" " * 13
            )
        elif self.outcome in ("failed", "stopped"):
            lines.append("  to do:     read the log above; VLMPIPE_DEBUG=1 makes errors show where they come from")
        if self.command and self.outcome in ("failed", "stopped"):
            lines.append(f"  continue:  {self.command}")
        return lines

    def as_json(self) -> dict[str, Any]:
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
            "remedy": self.pattern.remedy if self.pattern else None,
            "seen": {"where": hit.where, "line": hit.line, "text": hit.text} if hit else None,
            "ended": [asdict(end) for end in self.ends],
            "stall": _stall_as_json(stall) if stall else None,
            "also": list(self.also),
            "notes": list(self.notes),
            "last_lines": list(self.last_lines),
            "command": self.command or None,
        }


def diagnose(root: str, name: str) -> Diagnosis:
    """Diagnose the run of that id under `root`, or the one in the folder of that name.

    Raises ConfigError when there is none.
    """
    folder = Path(name)
    if not (folder.is_dir() and any((folder / file).exists() for file in RUN_FILES)):
        folder = find_run(root, name).folder
    return diagnose_folder(folder)


def diagnose_folder(folder: Path) -> Diagnosis:
    """Diagnose a run's folder, that of a run elsewhere (downloaded from its bucket) too."""
    marker = read_marker(folder)
    since_s = marker.started_s if marker else 0.0
    running = marker is not None and is_running(folder)
    state = read_state(folder, now_s=time.time(), since_s=since_s)
    if marker and not running:
        state = state.ended(marker.exit_code)
    step = next((one for one in state.steps if one.state in ("failed", "stopped")), None)
    # Without a marker nobody has closed the records of what was killed: the last step that began is the one.
    step = step or next((one for one in reversed(state.steps) if one.state == "running"), None)
    code = _exit_code(marker.exit_code if marker else None, step)
    if running:
        outcome = "running"
    elif marker:
        outcome = "stopped" if marker.exit_code in STOPPED else "failed" if marker.exit_code else "done"
    else:
        outcome = "failed" if step else "done"
    bad = outcome in ("failed", "stopped")
    texts = _texts(folder, step) if bad else []
    pattern, hit, also = _decide(texts, code) if bad else (None, None, [])
    ends = _rank_ends(texts)
    stall = None
    if pattern and pattern.id in STALL_IDS:
        stall = read_stall(folder, world_size=_world_size(folder), since_s=since_s)
    chaos = [
        str(line["chaos"])
        for line in read_chaos(folder, since_s=since_s)
        if "chaos" in line and line["event"] != "missed"
    ]
    return Diagnosis(
        run=folder.resolve().name,
        outcome=outcome,
        step=step.name if step else "",
        exit_code=code,
        pattern=pattern,
        hit=hit,
        also=tuple(also),
        ends=tuple(ends),
        stall=stall,
        notes=tuple(f"ordered by --chaos: {text}" for text in chaos),
        last_lines=_last_lines(texts) if bad and pattern is None else (),
        command=shlex.join(marker.command) if marker else "",
    )


def _exit_code(of_run: int | None, step: Step | None) -> int | None:
    if of_run is not None:
        return of_run
    code = step.detail.get("exit_code") if step else None
    return int(code) if code is not None else None


def _texts(folder: Path, step: Step | None) -> list[Text]:
    """What the run said of its end, the most telling first."""
    texts = []
    if step and step.detail.get("error"):
        texts.append(Text(f"steps/{step.name}.json", str(step.detail["error"])))
    names = [step.name] if step else sorted(path.name for path in (folder / "logs").glob("*") if path.is_dir())
    first = str(step.detail.get("replica", "")) if step else ""
    logs = [path for name in names for path in sorted((folder / "logs" / name).glob("*.log"))]
    for path in sorted(logs, key=lambda path: path.stem != first):
        texts.append(_end_of(path, path.relative_to(folder).as_posix()))
    if (folder / LOG).exists():
        log = _end_of(folder / LOG, LOG)
        earlier, mark, this = log.text.rpartition(ATTEMPT_LINE)
        texts.append(Text(LOG, mark + this, log.first_line + earlier.count("\n")))
    return [text for text in texts if text.text.strip()]


def _end_of(path: Path, where: str) -> Text:
    """The end of a log, and the number of the line it begins in."""
    with path.open("rb") as file:
        skipped = 0
        for _ in range(max(0, path.stat().st_size - LOG_BYTES) // LOG_BYTES):
            skipped += file.read(LOG_BYTES).count(b"\n")
        return Text(where, file.read().decode("utf-8", "replace"), skipped + 1)


def _decide(texts: Sequence[Text], code: int | None) -> tuple[Pattern | None, Hit | None, list[str]]:
    """The cause, where it was seen, and what else was recognised."""
    found = [hit for text in texts for hit in hits(text.where, text.text, first_line=text.first_line)]
    causes = [hit for hit in found if hit.pattern.kind == "cause"]
    said = [hit for hit in causes if code in hit.pattern.exit_codes] or causes
    by_code = next((pattern for pattern in patterns() if code in pattern.exit_codes), None)
    if said:
        hit: Hit | None = said[0]
    elif by_code:
        return by_code, None, _others(found, by_code)
    else:
        hit = found[0] if found else None
    return (hit.pattern, hit, _others(found, hit.pattern)) if hit else (None, None, [])


def _others(found: Sequence[Hit], chosen: Pattern) -> list[str]:
    others: dict[str, str] = {}
    for hit in found:
        if hit.pattern.id != chosen.id:
            others.setdefault(hit.pattern.id, f"{hit.pattern.cause} ({hit.where}:{hit.line})")
    return list(others.values())


def _rank_ends(texts: Sequence[Text]) -> list[RankEnd]:
    """The ranks of the last attempt in the order in which they ended, by what each node's launcher noted."""
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


def _world_size(folder: Path) -> int:
    return int(read_json(folder / "preflight.json").get("world_size", 0))


def _last_lines(texts: Sequence[Text]) -> tuple[str, ...]:
    logs = [text for text in texts if text.where.endswith(".log")] or list(texts)
    return tuple(line for line in logs[0].text.splitlines() if line.strip())[-LAST_LINES:] if logs else ()


def _stall_as_json(stall: Stall) -> dict[str, Any]:
    return {
        "last_step": stall.last_step,
        "deepest_common_call": stall.common.text() if stall.common else None,
        "ranks": {str(rank): [frame.text() for frame in frames] for rank, frames in stall.ranks.items()},
        "silent_ranks": list(stall.silent),
    }
