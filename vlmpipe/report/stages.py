"""The stages before the last one in a run's report: their folders, answers of their gates, planned beside measured."""

from __future__ import annotations

from collections.abc import Iterator

from vlmpipe.records.stage_folders import STAGES_FOLDER
from vlmpipe.report.load import RunFiles, count, duration, number, percent
from vlmpipe.report.plan_section import plan_of
from vlmpipe.report.tables import outcome, train_seconds

UNKNOWN = "unknown"


def stage_view(name: str, files: RunFiles, charts: list[dict[str, object]]) -> dict[str, object]:
    """Values for the template. `name` is empty for the last stage, which the rest of the page is about."""
    return {
        "name": name or "last stage",
        "report": f"{STAGES_FOLDER}/{name}/report.html" if name else "",
        "outcome": outcome(files),
        "charts": [chart for chart in charts if chart["metric"] in ("loss", "validation_loss")] if name else [],
        "figures": dict(_figures(files)),
    }


def stages_outcome(name: str, files: RunFiles) -> dict[str, str]:
    """How a run ended that did not come to its last stage: as the stage that it came to."""
    stages = outcome(files)
    return stages | {"title": f"{stages['title']} in stage {name}" if stages["kind"] != "accepted" else "Not finished"}


def _figures(files: RunFiles) -> Iterator[tuple[str, str]]:
    """Planned and measured, by column."""
    time, cost = plan_of(files)
    took_s = train_seconds(files)
    steps, hours, usd = time.steps, time.train_hours, cost.usd
    done, loss = files.summary.steps, number(files.evaluation.loss)
    yield "Steps planned", UNKNOWN if steps is None else count(steps)
    yield "Steps done", "–" if done is None else count(done)
    yield "Training planned", UNKNOWN if hours is None else duration(3600 * hours)
    yield "Training took", "–" if took_s is None else duration(took_s)
    yield "Cost planned", UNKNOWN if usd is None else f"${usd:,.2f}"
    yield "Validation loss", "–" if loss is None else f"{loss:.3f}"
    yield "Exact match", percent(number(files.evaluation.exact_match)) or "–"
