"""The comparison as one self-contained HTML page, in the style of the run report."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime

from markupsafe import Markup

from vlmpipe.comparison.compare import Comparison
from vlmpipe.comparison.usage_figures import usage_figures
from vlmpipe.report.pages import STYLE, page_template
from vlmpipe.report.samples import PreparedImages, sample_cards, spread
from vlmpipe.report.start_section import start_rows
from vlmpipe.trainer import __version__

SHOWN = 24
TITLES = {"exact_match": "Exact match", "vqa_accuracy": "VQA accuracy", "anls": "ANLS"}


def build_page(comparison: Comparison) -> str:
    """The page's HTML, with images of questions that the runs disagree about."""
    images = PreparedImages(comparison.sides[0].prepared_uri)
    return page_template("vlmpipe.comparison.page", "page.html.j2").render(
        style=Markup(STYLE),
        comparison=comparison,
        names=[side.name for side in comparison.sides],
        titles=TITLES,
        whole=[line for line in comparison.scores if not line.slice],
        slices=[line for line in comparison.scores if line.slice and line.metric == "exact_match"],
        cards=sample_cards(images, spread([asdict(disagreement) for disagreement in comparison.disagreements], SHOWN)),
        starts=[(side.name, part) for side in comparison.sides for part in start_rows(side.evaluation)],
        usage=[
            {"name": side.name, "run_id": side.run_id, "figures": usage_figures(side.usage)}
            for side in comparison.sides
        ],
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
    )
