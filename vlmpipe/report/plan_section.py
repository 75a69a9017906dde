"""Plan section of the report: memory as a bar, time and cost by step.

The file may be from another version of the planner, so what it lacks is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from vlmpipe.records.plan import (
    MemoryPart,
    PlannedCost,
    PlannedMemory,
    PlannedRun,
    PlannedTime,
    StepCost,
    TermCost,
)
from vlmpipe.report.load import RunFiles, count, number, percent
from vlmpipe.report.tables import train_seconds

GIB = 2**30
COLORS = 7  # of the style sheet, .part0 to .part6
SMALL_SHARE = 0.01  # of the whole: below it, parts share a line
SYMBOLS = {"green": "✓", "amber": "!", "red": "✕"}
BADGES = {"green": "accepted", "amber": "unfinished", "red": "failed"}
TERMS = ("standard", "spot", "flex_start")
UNKNOWN = "unknown"


def plan_of(files: RunFiles) -> tuple[PlannedTime, PlannedCost]:
    """Return the planned time and cost, without any number where there is no plan."""
    plan = files.plan or PlannedRun()
    return plan.time or PlannedTime(), plan.cost or PlannedCost()


def plan_view(files: RunFiles) -> dict[str, object] | None:
    """Values for the template from the run's plan.json; None without one."""
    plan = files.plan
    if plan is None:
        return None
    time, cost = plan_of(files)
    by_term = {term: term_cost for term, term_cost in cost.by_term.items() if term in TERMS}
    missing = [name for term_cost in by_term.values() if term_cost.possible for name in term_cost.missing]
    return {
        "state": plan.state,
        "symbol": SYMBOLS.get(plan.state, "–"),
        "badge": BADGES.get(plan.state, "unfinished"),
        "facts": list(_facts(files, time, cost)),
        "memory": _memory(plan.memory) if plan.memory else None,
        "terms": list(by_term),
        "term": cost.term,
        "steps": list(_steps(files, by_term, cost.term)),
        "whole": [_dollars(term_cost.usd) if term_cost.possible else "–" for term_cost in by_term.values()],
        "missing": list(dict.fromkeys(missing)),
        "findings": sorted(plan.findings, key=lambda finding: str(finding.get("severity"))),  # errors come first
        "notes": list(dict.fromkeys((*plan.notes, *time.assumptions, *cost.assumptions))),
    }


def _facts(files: RunFiles, time: PlannedTime, cost: PlannedCost) -> Iterator[tuple[str, str]]:
    step_s, hours, steps = time.step_s, time.train_hours, time.steps
    yield "Time of a step", UNKNOWN if step_s is None else f"{step_s:.3g} s, bottleneck: {time.binds or UNKNOWN}"
    measured_s = [
        seconds for line in files.metrics[1:] if (seconds := number(line.get("step_s")))
    ]  # the first warms up
    if step_s and measured_s:
        took = statistics.median(measured_s)
        yield (
            "Time of a step, measured",
            f"{took:.3g} s, {took / step_s:.2f} of the plan; plan.calibrate_from latest plans the next run by it",
        )
    mfu = time.mfu
    yield "Model FLOPs utilisation", UNKNOWN if mfu is None else percent(mfu)
    done = files.summary.steps
    measured = "" if done is None else f" ({count(done)} done)"
    yield "Steps", (UNKNOWN if steps is None else count(steps)) + measured
    low, high = (time.interval.low, time.interval.high) if time.interval else (None, None)
    around = ""
    if hours is not None and low is not None and high is not None:
        around = f", between {hours * low:,.2f} and {hours * high:,.2f} h"
    yield "Training", UNKNOWN if hours is None else f"{hours:,.2f} h{around}"
    yield "Whole run", UNKNOWN if cost.usd is None else f"{_dollars(cost.usd)} on {cost.term}"
    yield "Storage", f"{_dollars(cost.storage_usd_per_month)} a month"


def _memory(memory: PlannedMemory) -> dict[str, object] | None:
    """Parts of one device's memory; the bar is as long as the capacity, or as the parts where they are more."""
    parts = [part for part in memory.parts if part.bytes]
    capacity, total = memory.capacity_bytes, sum(part.bytes for part in parts)
    if total <= 0:
        return None
    scale = max(total, capacity)
    spare = abs(capacity - total) / GIB
    fits = f"{spare:,.1f} GiB to spare" if capacity >= total else f"{spare:,.1f} GiB too much"
    return {
        "sentence": f"{total / GIB:,.1f} of {capacity / GIB:,.1f} GiB on one {memory.device}, {fits}.",
        "segments": list(_segments(parts, total, scale)),
        "capacity": capacity / scale,
    }


def merged_parts(parts: Sequence[MemoryPart]) -> list[MemoryPart]:
    """The largest first; several parts of less than a hundredth become one."""
    ordered = sorted(parts, key=lambda part: -part.bytes)
    total = sum(part.bytes for part in ordered)
    small = [part for part in ordered if part.bytes < SMALL_SHARE * total]
    if len(small) < 2:
        return ordered
    name, why = f"{len(small)} smaller parts", ", ".join(part.name for part in small)
    rest = MemoryPart(name=name, bytes=sum(part.bytes for part in small), why=why)
    return [*(part for part in ordered if part not in small), rest]


def _segments(parts: Sequence[MemoryPart], total: float, scale: float) -> Iterator[dict[str, str | float]]:
    """The parts; `left` and `width` are shares of the bar."""
    left = 0.0
    for place, part in enumerate(merged_parts(parts)):
        yield {
            "name": part.name, "gib": part.bytes / GIB, "share": part.bytes / total, "why": part.why,
            "kind": f"part{place % COLORS}", "left": left, "width": part.bytes / scale,
        }  # fmt: skip
        left += part.bytes / scale


def _steps(files: RunFiles, by_term: dict[str, TermCost], term: str) -> Iterator[dict[str, object]]:
    """Each job as planned and as measured; `share` is of the dollars of all jobs, on the run's own term."""
    took: dict[str, float | None] = {
        record.step: record.ended_s - record.started_s
        for record in files.steps
        if record.state == "done" and record.ended_s and record.started_s
    }
    if "train" in took:
        took["train"] = train_seconds(files)
    costs = _costs(by_term.get(term, TermCost()))
    total = sum(step.usd or 0.0 for step in costs.values())
    for job in dict.fromkeys(job for term_cost in by_term.values() for job in _costs(term_cost)):
        step = costs.get(job, StepCost(job=job))
        hours, usd = step.hours, step.usd
        yield {
            "job": job,
            "planned": UNKNOWN if hours is None else f"{hours:,.2f} h",
            "took_s": took.get(job.replace("_", "-")),
            "usd": [
                _dollars(_costs(term_cost).get(job, StepCost(job=job)).usd) if term_cost.possible else "–"
                for term_cost in by_term.values()
            ],
            "share": usd / total if usd is not None and total else 0.0,
        }


def _costs(term_cost: TermCost) -> dict[str, StepCost]:
    return {step.job: step for step in term_cost.steps}


def _dollars(usd: float | None) -> str:
    if usd is None:
        return UNKNOWN
    return f"${usd:,.2f}" if usd < 100 else f"${usd:,.0f}"
