"""Profile section of the report: a timeline of each profiled rank, its operations and its collectives."""

from __future__ import annotations

from vlmpipe.report.load import duration, mapping, number, percent, sequence
from vlmpipe.report.svg_charts import timeline

SHOWN_OPERATIONS = 12


def profile_view(profiles: list[dict[str, object]]) -> list[dict[str, object]]:
    """Values for the template, one of each rank (`train.profile`), without those that hold no times."""
    return [_rank_view(profile) for profile in profiles if (number(profile.get("seconds")) or 0.0) > 0]


def _rank_view(profile: dict[str, object]) -> dict[str, object]:
    seconds = number(profile.get("seconds")) or 1.0
    steps = f"steps {profile.get('first_step')} to {profile.get('last_step')}"
    communication, exposed = (number(profile.get(f"{name}_s")) for name in ("communication", "exposed_communication"))
    facts = [("Time", duration(seconds)), ("Computing", percent((number(profile.get("computing_s")) or 0.0) / seconds))]
    if communication:
        facts.append(("Communication", percent(communication / seconds)))
        facts.append(("Communication that nothing hides", percent((exposed or 0.0) / seconds)))
    return {
        "title": f"Rank {profile.get('rank')} on node {profile.get('node')}, {steps}",
        "svg": timeline(_lines(profile), label=f"Timeline of {steps}", seconds=seconds),
        "facts": facts,
        "operations": _rows(profile.get("operations"), seconds)[:SHOWN_OPERATIONS],
        "collectives": _rows(profile.get("collectives"), seconds),
        "trace": profile.get("trace"),
    }


def _lines(profile: dict[str, object]) -> dict[str, list[tuple[float, float]]]:
    lines = {}
    for name, spans in mapping(profile.get("spans")).items():
        ends = [[number(value) for value in sequence(span)] for span in sequence(spans)]
        lines[name] = [(end[0], end[1]) for end in ends if len(end) == 2 and None not in end]
    return lines  # type: ignore[return-value]


def _rows(rows: object, seconds: float) -> list[dict[str, object]]:
    lines = [mapping(line) for line in sequence(rows)]
    return [{**line, "share": (number(line.get("seconds")) or 0.0) / seconds} for line in lines]
