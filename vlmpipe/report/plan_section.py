"""Plan section of the report: memory as a bar, time and cost by step.

The file may be of another version of the planner, so what it lacks is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmpipe.report.format import count, percent
from vlmpipe.report.load import RunFiles, number

GIB = 2**30
COLORS = 7  # of the style sheet, .part0 to .part6
SMALL_SHARE = 0.01  # of the whole: below it, parts share a line
SYMBOLS = {"green": "✓", "amber": "!", "red": "✕"}
KINDS = {"green": "accepted", "amber": "unfinished", "red": "failed"}  # of the badge
TERMS = ("standard", "spot", "flex_start")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Segment:
    """One part of the memory bar; `left` and `width` are shares of the bar."""

    name: str
    gib: float
    share: float  # of all parts
    why: str
    kind: str  # class of the style sheet
    left: float
    width: float


@dataclass(frozen=True)
class MemoryBar:
    """What one device holds. The bar is as long as the capacity, or as the parts where they are more."""

    device: str
    sentence: str
    segments: tuple[Segment, ...]
    capacity: float  # share of the bar


@dataclass(frozen=True)
class StepRow:
    """One job, planned and as it was; empty texts are not known."""

    job: str
    planned: str
    took_s: float | None
    usd: tuple[str, ...]  # by term
    share: float  # of the dollars of all jobs, on the run's term


@dataclass(frozen=True)
class PlanView:
    """The section's content, ready to print."""

    state: str
    symbol: str
    kind: str
    facts: tuple[tuple[str, str], ...]
    memory: MemoryBar | None
    terms: tuple[str, ...]  # of the cost table; the run's own is `term`
    term: str
    steps: tuple[StepRow, ...]
    whole: tuple[str, ...]  # dollars of the whole run, by term
    missing: tuple[str, ...]  # prices
    findings: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]


def plan_view(files: RunFiles) -> PlanView | None:
    """What the run's plan.json says; None without one."""
    plan = files.plan
    if not plan:
        return None
    time, cost = _mapping(plan.get("time")), _mapping(plan.get("cost"))
    by_term = {term: _mapping(found) for term, found in _mapping(cost.get("by_term")).items() if term in TERMS}
    state = str(plan.get("state", UNKNOWN))
    missing = [name for found in by_term.values() if found.get("possible") for name in _list(found.get("missing"))]
    return PlanView(
        state=state,
        symbol=SYMBOLS.get(state, "–"),
        kind=KINDS.get(state, "unfinished"),
        facts=tuple(_facts(files, time, cost)),
        memory=_memory(_mapping(plan.get("memory"))),
        terms=tuple(by_term),
        term=str(cost.get("term", "")),
        steps=tuple(_steps(files, by_term, str(cost.get("term", "")))),
        whole=tuple(_dollars(found.get("usd")) if found.get("possible") else "–" for found in by_term.values()),
        missing=tuple(dict.fromkeys(map(str, missing))),
        findings=tuple(sorted(_findings(plan), key=lambda one: str(one.get("severity")))),  # errors come first
        notes=tuple(
            dict.fromkeys(
                str(line)
                for lines in (plan.get("notes"), time.get("assumptions"), cost.get("assumptions"))
                for line in _list(lines)
            )
        ),
    )


def _facts(files: RunFiles, time: Mapping[str, Any], cost: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Planned numbers, next to what was measured where there is such a thing."""
    step_s, hours, steps = number(time.get("step_s")), number(time.get("train_hours")), number(time.get("steps"))
    yield "Time of a step", UNKNOWN if step_s is None else f"{step_s:.3g} s, binds: {time.get('binds', UNKNOWN)}"
    mfu = number(time.get("mfu"))
    yield "Model FLOPs utilisation", UNKNOWN if mfu is None else percent(mfu)
    done = number(files.summary.get("steps"))
    measured = "" if done is None else f" ({count(int(done))} done)"
    yield "Steps", (UNKNOWN if steps is None else count(int(steps))) + measured
    yield "Training", UNKNOWN if hours is None else f"{hours:,.2f} h"
    usd = number(cost.get("usd"))
    yield "Whole run", UNKNOWN if usd is None else f"{_dollars(usd)} on {cost.get('term')}"
    yield "Storage", f"{_dollars(cost.get('storage_usd_per_month'))} a month"


def _memory(memory: Mapping[str, Any]) -> MemoryBar | None:
    parts = [part for part in _list(memory.get("parts")) if isinstance(part, dict) and number(part.get("bytes"))]
    capacity, total = number(memory.get("capacity_bytes")) or 0.0, sum(number(part["bytes"]) or 0.0 for part in parts)
    if total <= 0:
        return None
    scale = max(total, capacity)
    spare = abs(capacity - total) / GIB
    fits = f"{spare:,.1f} GiB to spare" if capacity >= total else f"{spare:,.1f} GiB too much"
    device = str(memory.get("device", "device"))
    return MemoryBar(
        device=device,
        sentence=f"{total / GIB:,.1f} of {capacity / GIB:,.1f} GiB on one {device}, {fits}.",
        segments=tuple(_segments(parts, total, scale)),
        capacity=capacity / scale,
    )


def _segments(parts: Sequence[Mapping[str, Any]], total: float, scale: float) -> Iterator[Segment]:
    """The largest first; several parts of less than a hundredth become one."""
    ordered = sorted((part["bytes"], str(part.get("name", "")), str(part.get("why", ""))) for part in parts)[::-1]
    small = [part for part in ordered if part[0] < SMALL_SHARE * total]
    if len(small) > 1:
        names = ", ".join(name for _, name, _ in small)
        ordered = [*ordered[: -len(small)], (sum(size for size, _, _ in small), f"{len(small)} smaller parts", names)]
    left = 0.0
    for place, (size, name, why) in enumerate(ordered):
        yield Segment(name, size / GIB, size / total, why, f"part{place % COLORS}", left, size / scale)
        left += size / scale


def _steps(files: RunFiles, by_term: Mapping[str, Mapping[str, Any]], term: str) -> Iterator[StepRow]:
    took = {
        record["step"]: record["ended_s"] - record["started_s"]
        for record in files.steps
        if record.get("state") == "done" and number(record.get("ended_s")) and number(record.get("started_s"))
    }
    own = _costs(by_term.get(term, {}))
    total = sum(number(step.get("usd")) or 0.0 for step in own.values())
    jobs = dict.fromkeys(job for found in by_term.values() for job in _costs(found))
    for job in jobs:
        step = own.get(job, {})
        hours, usd = number(step.get("hours")), number(step.get("usd"))
        yield StepRow(
            job=job,
            planned=UNKNOWN if hours is None else f"{hours:,.2f} h",
            took_s=took.get(job.replace("_", "-")),
            usd=tuple(
                _dollars(_costs(found).get(job, {}).get("usd")) if found.get("possible") else "–"
                for found in by_term.values()
            ),
            share=usd / total if usd is not None and total else 0.0,
        )


def _costs(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {str(step.get("job")): step for step in _list(found.get("steps")) if isinstance(step, dict)}


def _findings(plan: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [finding for finding in _list(plan.get("findings")) if isinstance(finding, dict)]


def _dollars(usd: Any) -> str:
    amount = number(usd)
    if amount is None:
        return UNKNOWN
    return f"${amount:,.2f}" if amount < 100 else f"${amount:,.0f}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
