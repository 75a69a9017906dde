"""The section on a learning curve in the report of its run."""

from __future__ import annotations

import math

from markupsafe import Markup

from vlmpipe.comparison.page import TITLES
from vlmpipe.records.learning_curve import LearningCurve, percent
from vlmpipe.report.pages import page_template
from vlmpipe.report.svg_charts import (
    HEIGHT,
    WIDTH,
    Frame,
    axes,
    compact,
    mark_line,
    nice_ticks,
    polyline,
    reference_line,
)

STEPS = (1, 2, 5)  # of a decade, at which a logarithmic axis has ticks


def curve_section(curve: LearningCurve) -> Markup:
    """The section's HTML."""
    template = page_template("vlmpipe.comparison.curve.page", "section.html.j2")
    return Markup(template.render(curve=curve, title=TITLES[curve.metric], chart=curve_chart(curve), percent=percent))


def curve_chart(curve: LearningCurve) -> Markup | None:
    """Scores of shares with their intervals, and the law with its own; None where no training is done."""
    points = [(point.samples, point.score) for point in curve.points if point.score]
    if not points:
        return None
    band = [(prediction.samples, prediction.score) for prediction in curve.predictions]
    spread = [score for _, score in points + band]
    xs = [math.log10(samples) for samples, _ in points + band]
    highs = [score.high if score.high is not None else 1.0 for score in spread]
    y_ticks = nice_ticks(min(score.low for score in spread), max(*highs, curve.goal))
    room = 0.04 * (max(xs) - min(xs)) or 0.5
    frame = Frame(min(xs) - room, max(xs) + room, y_ticks[0], y_ticks[-1])
    drawn = [axes(frame, _decades(frame), y_ticks, "training samples", lambda x: compact(10**x))]
    drawn.append(mark_line(frame, math.log10(curve.samples), "all samples that there are"))
    drawn.append(reference_line(frame, curve.goal, f"goal {percent(curve.goal)}"))
    if band:
        upper = [(math.log10(samples), score.high if score.high is not None else 1.0) for samples, score in band]
        lower = [(math.log10(samples), score.low) for samples, score in band]
        drawn.append(Markup('<polygon class="band" points="{}"/>').format(frame.path(upper + lower[::-1])))
        drawn.append(polyline(frame, [(math.log10(samples), score.value) for samples, score in band], "line"))
    bar = Markup('<line class="whisker" x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}"/>')
    dot = Markup(
        '<circle class="spot front" cx="{:.1f}" cy="{:.1f}" r="5"><title>{} samples: {} ({} to {})</title></circle>'
    )
    for samples, score in points:
        x, high = frame.across(math.log10(samples)), score.high if score.high is not None else 1.0
        drawn.append(bar.format(x, frame.down(score.low), frame.down(high)))
        named = (compact(value) for value in (score.value, score.low, high))
        drawn.append(dot.format(x, frame.down(score.value), f"{samples:,.0f}", *named))
    svg = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return svg.format(WIDTH, HEIGHT, f"Score by training samples: {curve.decision}", Markup("").join(drawn))


def _decades(frame: Frame) -> list[float]:
    """Places of 1, 2 and 5 times powers of ten on the logarithmic axis; powers alone where these are many."""
    low, high = math.floor(frame.x_low), math.ceil(frame.x_high)
    places = [decade + math.log10(step) for decade in range(low, high + 1) for step in STEPS]
    shown = [place for place in places if frame.x_low <= place <= frame.x_high]
    return shown if len(shown) <= 9 else [place for place in shown if place == round(place)]
