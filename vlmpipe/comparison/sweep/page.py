"""The comparison of a sweep as one self-contained HTML page, which is the run's report."""

from __future__ import annotations

from datetime import UTC, datetime

from markupsafe import Markup

from vlmpipe.comparison.page import TITLES
from vlmpipe.records.sweep_comparison import ComparedVariant, SweepComparison
from vlmpipe.report.pages import STYLE, page_template
from vlmpipe.report.svg_charts import Spot, scatter_chart
from vlmpipe.trainer import __version__
from vlmpipe.trainer.storage import open_storage

PAGE = "report.html"
COSTS = {  # field of a front -> title and unit of its chart
    "image_tokens": ("Score against tokens an image", "visual tokens an image"),
    "device_hours": ("Score against device hours", "device hours of a training and its evaluation"),
}


def write_page(run_uri: str, comparison: SweepComparison, curve: Markup | None = None) -> str:
    """Write the page as the run's report. Returns its text. `curve`: the section on a learning curve."""
    page = build_page(comparison, run_uri.rstrip("/").rpartition("/")[2], curve)
    open_storage(run_uri).write(PAGE, page.encode())
    return page


def build_page(comparison: SweepComparison, run_id: str, curve: Markup | None = None) -> str:
    """The page's HTML."""
    measured = [variant for variant, _ in comparison.ranked]
    return page_template("vlmpipe.comparison.sweep.page", "page.html.j2").render(
        style=Markup(STYLE),
        comparison=comparison,
        curve=curve,
        run_id=run_id,
        ranked=measured,
        failed=[variant for variant in comparison.variants if variant.errors],
        charts=[chart for cost, texts in COSTS.items() if (chart := _chart(cost, *texts, measured))],
        selects=any(variant.selection for variant in measured),
        title=TITLES[comparison.metric],
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
    )


def _chart(cost: str, title: str, unit: str, variants: list[ComparedVariant]) -> dict[str, object] | None:
    """The front of one kind of cost; None where fewer than two variants have that cost."""
    spots = [
        Spot(variant.name, x, variant.score.value, *variant.score.interval, is_on_front=cost in variant.on_front)
        for variant in variants
        if variant.score and (x := _cost(variant, cost)) is not None
    ]
    if len(spots) < 2:
        return None
    front = ", ".join(spot.name for spot in sorted(spots, key=lambda spot: spot.x) if spot.is_on_front)
    label = f"{title}; no other variant is better and cheaper than {front}"
    return {"title": title, "front": front, "svg": scatter_chart(spots, label=label, x_label=unit)}


def _cost(variant: ComparedVariant, cost: str) -> float | None:
    if cost == "device_hours":
        return variant.device_hours
    return (variant.selection or {}).get("mean_image_tokens")
