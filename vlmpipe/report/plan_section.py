"""Plan section of the report: memory as a bar, time and cost by step.

The file may be from another version of the planner, so what it lacks is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlmpipe.report.load import RunFiles, count, mapping, number, percent, sequence
from vlmpipe.report.tables import train_seconds

GIB = 2**30
COLORS = 7  # of the style sheet, .part0 to .part6
SMALL_SHARE = 0.01  # of the whole: below it, parts share a line
SYMBOLS = {"green": "✓", "amber": "!", "red": "✕"}
BADGES = {"green": "accepted", "amber": "unfinished", "red": "failed"}
TERMS = ("standard", "spot", "flex_start")
UNKNOWN = "unknown"


def plan_view(files: RunFiles) -> dict[str, Any] | None:
    """Values for the template from the run's plan.json; None without one."""
    plan = files.plan
    if not plan:
        return None
    time, cost = mapping(plan.get("time")), mapping(plan.get("cost"))
    by_term = {term: mapping(found) for term, found in mapping(cost.get("by_term")).items() if term in TERMS}
    state, term = str(plan.get("state", UNKNOWN)), str(cost.get("term", ""))
    missing = [name for found in by_term.values() if found.get("possible") for name in sequence(found.get("missing"))]
    findings = [finding for finding in sequence(plan.get("findings")) if isinstance(finding, dict)]
    notes = [*sequence(plan.get("notes")), *sequence(time.get("assumptions")), *sequence(cost.get("assumptions"))]
    return {
        "state": state,
        "symbol": SYMBOLS.get(state, "–"),
        "badge": BADGES.get(state, "unfinished"),
        "facts": list(_facts(files, time, cost)),
        "memory": _memory(mapping(plan.get("memory"))),
        "terms": list(by_term),
        "term": term,
        "steps": list(_steps(files, by_term, term)),
        "whole": [_dollars(found.get("usd")) if found.get("possible") else "–" for found in by_term.values()],
        "missing": list(dict.fromkeys(map(str, missing))),
        "findings": sorted(findings, key=lambda one: str(one.get("severity"))),  # errors come first
        "notes": list(dict.fromkeys(map(str, notes))),
    }


def _facts(files: RunFiles, time: dict[str, Any], cost: dict[str, Any]) -> Iterator[tuple[str, str]]:
    step_s, hours, steps = number(time.get("step_s")), number(time.get("train_hours")), number(time.get("steps"))
    yield "Time of a step", UNKNOWN if step_s is None else f"{step_s:.3g} s, bottleneck: {time.get('binds', UNKNOWN)}"
    measured_s = [
        seconds for line in files.metrics[1:] if (seconds := number(line.get("step_s")))
    ]  # the first warms up
    if step_s and measured_s:
        took = statistics.median(measured_s)
        yield (
            "Time of a step, measured",
            f"{took:.3g} s, {took / step_s:.2f} of the plan; plan.calibrate_from latest plans the next run by it",
        )
    mfu = number(time.get("mfu"))
    yield "Model FLOPs utilisation", UNKNOWN if mfu is None else percent(mfu)
    done = files.summary.steps
    measured = "" if done is None else f" ({count(done)} done)"
    yield "Steps", (UNKNOWN if steps is None else count(int(steps))) + measured
    interval = mapping(time.get("interval"))
    low, high = number(interval.get("low")), number(interval.get("high"))
    around = "" if None in (hours, low, high) else f", between {hours * low:,.2f} and {hours * high:,.2f} h"  # type: ignore[operator]
    yield "Training", UNKNOWN if hours is None else f"{hours:,.2f} h{around}"
    usd = number(cost.get("usd"))
    yield "Whole run", UNKNOWN if usd is None else f"{_dollars(usd)} on {cost.get('term')}"
    yield "Storage", f"{_dollars(cost.get('storage_usd_per_month'))} a month"


def _memory(memory: dict[str, Any]) -> dict[str, Any] | None:
    """Parts of one device's memory; the bar is as long as the capacity, or as the parts where they are more."""
    parts = [part for part in sequence(memory.get("parts")) if isinstance(part, dict) and number(part.get("bytes"))]
    capacity, total = number(memory.get("capacity_bytes")) or 0.0, sum(number(part["bytes"]) or 0.0 for part in parts)
    if total <= 0:
        return None
    scale = max(total, capacity)
    spare = abs(capacity - total) / GIB
    fits = f"{spare:,.1f} GiB to spare" if capacity >= total else f"{spare:,.1f} GiB too much"
    device = memory.get("device", "device")
    return {
        "sentence": f"{total / GIB:,.1f} of {capacity / GIB:,.1f} GiB on one {device}, {fits}.",
        "segments": list(_segments(parts, total, scale)),
        "capacity": capacity / scale,
    }


def merged_parts(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The largest first; several parts of less than a hundredth become one."""
    ordered = sorted(parts, key=lambda part: -part["bytes"])
    total = sum(part["bytes"] for part in ordered)
    small = [part for part in ordered if part["bytes"] < SMALL_SHARE * total]
    if len(small) < 2:
        return [dict(part) for part in ordered]
    rest = {
        "name": f"{len(small)} smaller parts",
        "bytes": sum(part["bytes"] for part in small),
        "why": ", ".join(str(part.get("name", "")) for part in small),
    }
    return [*(dict(part) for part in ordered if part not in small), rest]


def _segments(parts: list[dict[str, Any]], total: float, scale: float) -> Iterator[dict[str, Any]]:
    """The parts; `left` and `width` are shares of the bar."""
    left = 0.0
    for place, part in enumerate(merged_parts(parts)):
        size = part["bytes"]
        yield {
            "name": part.get("name", ""), "gib": size / GIB, "share": size / total, "why": part.get("why", ""),
            "kind": f"part{place % COLORS}", "left": left, "width": size / scale,
        }  # fmt: skip
        left += size / scale


def _steps(files: RunFiles, by_term: dict[str, dict[str, Any]], term: str) -> Iterator[dict[str, Any]]:
    """Each job as planned and as measured; `share` is of the dollars of all jobs, on the run's own term."""
    took: dict[str, float | None] = {
        record["step"]: record["ended_s"] - record["started_s"]
        for record in files.steps
        if record.get("state") == "done" and number(record.get("ended_s")) and number(record.get("started_s"))
    }
    if "train" in took:
        took["train"] = train_seconds(files)
    own = _costs(by_term.get(term, {}))
    total = sum(number(step.get("usd")) or 0.0 for step in own.values())
    for job in dict.fromkeys(job for found in by_term.values() for job in _costs(found)):
        step = own.get(job, {})
        hours, usd = number(step.get("hours")), number(step.get("usd"))
        yield {
            "job": job,
            "planned": UNKNOWN if hours is None else f"{hours:,.2f} h",
            "took_s": took.get(job.replace("_", "-")),
            "usd": [
                _dollars(_costs(found).get(job, {}).get("usd")) if found.get("possible") else "–"
                for found in by_term.values()
            ],
            "share": usd / total if usd is not None and total else 0.0,
        }


def _costs(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {str(step.get("job")): step for step in sequence(found.get("steps")) if isinstance(step, dict)}


def _dollars(usd: Any) -> str:
    amount = number(usd)
    if amount is None:
        return UNKNOWN
    return f"${amount:,.2f}" if amount < 100 else f"${amount:,.0f}"
