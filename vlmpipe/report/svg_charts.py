"""Line charts and timelines as inline SVG: axes, ticks, labels, hover titles. The style sheet has colours and fonts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 14, 14, 52  # room for tick labels, also at the larger type of narrow screens
MAX_POINTS = 400  # a line has no more corners than a screen has columns
MAX_HOVERS = 120
NAME_WIDTH = 90  # of a spot's name, about
PARTS = 7  # colours of lines and parts that the style sheet has
SMOOTH_FROM = 40  # with fewer points the raw line reads well by itself

Point = tuple[float, float]


def compact(value: float) -> str:
    """A number as an axis shows it: 12.5k, 3M, 0.002, 1e-05."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}"


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """About `most` numbers that cover `low` to `high`, 1, 2 or 5 times a power of ten apart."""
    size = max(abs(low), abs(high))
    if high - low <= 1e-9 * size or size < 1e-100:  # one value, as far as a chart can show
        room = 0.5 * size if size >= 1e-100 else 0.5
        low, high = low - room, high + room
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 2 - math.floor(math.log10(step))  # else 0.30000000000000004
    return [round(number * step, digits) for number in range(first, last + 1)]


def thin_out(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """At most `most` points, the lowest and the highest of each stretch: no spike disappears."""
    if len(points) <= most:
        return list(points)
    thinned: list[Point] = []
    stretches = most // 2
    for number in range(stretches):
        stretch = points[number * len(points) // stretches : (number + 1) * len(points) // stretches]
        thinned += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return thinned


def smooth(points: Sequence[Point]) -> list[Point]:
    """Mean over a centred window around each point, a twentieth of the line wide."""
    half = max(1, len(points) // 40)
    windows = (points[max(0, number - half) : number + half + 1] for number in range(len(points)))
    return [(x, sum(y for _, y in window) / len(window)) for (x, _), window in zip(points, windows, strict=True)]


@dataclass(frozen=True)
class Frame:
    """The ranges of both axes; maps values to places inside them."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def across(self, x: float) -> float:
        return LEFT + (x - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def down(self, y: float) -> float:
        return TOP + (self.y_high - y) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Sequence[Point]) -> str:
        return " ".join(f"{self.across(x):.1f},{self.down(y):.1f}" for x, y in points)


def line_chart(
    points: Sequence[Point],
    *,
    label: str,
    x_label: str,
    from_zero: bool = False,
    smoothed: bool = False,
    reference: tuple[float, str] | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> Markup:
    """One line through `points` (x ascending, all finite, at least one).

    Args:
        label: Description for screen readers.
        smoothed: Draw the moving average over the line.
        reference: A dashed horizontal line at a value, and its name.
        marks: Dotted vertical lines at x values, and their names.
    """
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if reference:
        ys.append(reference[0])
    y_ticks = nice_ticks(0.0 if from_zero else min(ys), max(ys))
    x_low, x_high = (xs[0], xs[-1]) if len(xs) > 1 else (xs[0] - 1, xs[0] + 1)
    frame = Frame(x_low, x_high, y_ticks[0], y_ticks[-1])
    x_ticks = [tick for tick in nice_ticks(x_low, x_high) if x_low <= tick <= x_high]
    drawn = [
        axes(frame, x_ticks, y_ticks, x_label),
        *(mark_line(frame, x, name) for x, name in marks),
        *([reference_line(frame, *reference)] if reference else []),
        polyline(frame, points, "line raw" if smoothed else "line"),
        *([polyline(frame, smooth(points), "line")] if smoothed else []),
        *(_hover(frame, point, x_label) for point in thin_out(points, MAX_HOVERS)),
    ]
    svg = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return svg.format(WIDTH, HEIGHT, label, Markup("").join(drawn))


def lines_chart(lines: Mapping[str, Sequence[Point]], *, label: str, x_label: str) -> Markup:
    """A line for each name, in the colours of `PARTS` in their order. Points as for `line_chart`, at least one each."""
    points = [point for line in lines.values() for point in line]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    y_ticks = nice_ticks(min(ys), max(ys))
    x_low, x_high = (min(xs), max(xs)) if min(xs) < max(xs) else (min(xs) - 1, min(xs) + 1)
    frame = Frame(x_low, x_high, y_ticks[0], y_ticks[-1])
    drawn = [axes(frame, [tick for tick in nice_ticks(x_low, x_high) if x_low <= tick <= x_high], y_ticks, x_label)]
    for number, (name, line) in enumerate(lines.items()):
        group = Markup('<g style="color:var(--part{})">{}{}</g>')
        hovers = (_hover(frame, point, f"{name}, {x_label}") for point in thin_out(line, MAX_HOVERS))
        drawn.append(group.format(number % PARTS, polyline(frame, line, "line own"), Markup("").join(hovers)))
    svg = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return svg.format(WIDTH, HEIGHT, label, Markup("").join(drawn))


@dataclass(frozen=True)
class Spot:
    """A named point with the ends of its interval. `is_on_front`: no other is better at its cost."""

    name: str
    x: float
    y: float
    low: float
    high: float
    is_on_front: bool


def scatter_chart(spots: Sequence[Spot], *, label: str, x_label: str) -> Markup:
    """Named points with intervals, and the line through those on the front."""
    y_ticks = nice_ticks(min(spot.low for spot in spots), max(spot.high for spot in spots))
    xs = [spot.x for spot in spots]
    room = 0.06 * (max(xs) - min(xs)) or 0.5 * abs(max(xs)) or 1.0
    frame = Frame(max(0.0, min(xs) - room), max(xs) + room, y_ticks[0], y_ticks[-1])
    x_ticks = [tick for tick in nice_ticks(frame.x_low, frame.x_high) if frame.x_low <= tick <= frame.x_high]
    front = sorted((spot.x, spot.y) for spot in spots if spot.is_on_front)
    bar = Markup('<line class="whisker" x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}"/>')
    dot = Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{}"><title>{}: {}, {} ({} to {})</title></circle>')
    name = Markup('<text class="spot-name" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
    drawn = [axes(frame, x_ticks, y_ticks, x_label), polyline(frame, front, "line")]
    named_at = -math.inf  # where the last name above its spot is
    for spot in sorted(spots, key=lambda s: (s.is_on_front, s.x)):  # the front is drawn over the others
        x, y = frame.across(spot.x), frame.down(spot.y)
        numbers = [compact(value) for value in (spot.x, spot.y, spot.low, spot.high)]
        drawn.append(bar.format(x, frame.down(spot.low), frame.down(spot.high)))
        drawn.append(dot.format("spot front" if spot.is_on_front else "spot", x, y, 5, spot.name, *numbers))
        if spot.is_on_front:  # the others have theirs as a title: many lie together
            is_right, is_above = x > WIDTH * 0.7, x - named_at > NAME_WIDTH
            named_at = x if is_above else named_at
            place = (x - 7 if is_right else x + 7, y - 8 if is_above else y + 18)
            drawn.append(name.format(*place, "end" if is_right else "start", spot.name))
    svg = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return svg.format(WIDTH, HEIGHT, label, Markup("").join(drawn))


def timeline(lines: Mapping[str, Sequence[tuple[float, float]]], *, label: str, seconds: float) -> Markup:
    """A line of bars for each name, from spans (start and end in seconds) within `seconds` (more than 0)."""
    left, width, height = 190, 2 * WIDTH, 30
    bottom = TOP + height * len(lines)
    scale = (width - left - RIGHT) / seconds
    bar = Markup('<rect class="bar" x="{:.2f}" y="{}" width="{:.2f}" height="{}"><title>{}: {:.4g} s</title></rect>')
    text = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" dominant-baseline="{}">{}</text>')
    drawn = []
    for number, (name, spans) in enumerate(lines.items()):
        top = TOP + height * number
        drawn.append(text.format(left - 8, top + height / 2, "end", "middle", name))
        drawn += [
            bar.format(left + start * scale, top + 4, max(0.5, (end - start) * scale), height - 8, name, end - start)
            for start, end in spans
        ]
    for tick in nice_ticks(0.0, seconds):
        if tick <= seconds:
            drawn.append(text.format(left + tick * scale, bottom + 4, "middle", "hanging", f"{compact(tick)} s"))
    svg = Markup('<svg class="chart wide" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return svg.format(width, bottom + 24, label, Markup("").join(drawn))


def axes(
    frame: Frame,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_label: str,
    x_name: Callable[[float], str] = compact,
) -> Markup:
    """Grid, ticks and the name of the horizontal axis. `x_name`: the text of a tick there."""
    line = Markup('<line class="grid" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>')
    text = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" dominant-baseline="{}">{}</text>')
    bottom, right, parts = HEIGHT - BOTTOM, WIDTH - RIGHT, []
    for y in y_ticks:
        place = frame.down(y)
        parts += [line.format(LEFT, right, place, place), text.format(LEFT - 8, place, "end", "middle", compact(y))]
    for x in x_ticks:
        place = frame.across(x)
        parts += [line.format(place, place, bottom, bottom + 5)]
        parts += [text.format(place, bottom + 9, "middle", "hanging", x_name(x))]
    return Markup("").join([*parts, text.format((LEFT + right) / 2, HEIGHT - 6, "middle", "auto", x_label)])


def mark_line(frame: Frame, x: float, name: str) -> Markup:
    """A dotted vertical line."""
    line = Markup('<line class="mark" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"><title>{3}</title></line>')
    return line.format(frame.across(x), TOP, HEIGHT - BOTTOM, name)


def reference_line(frame: Frame, value: float, name: str) -> Markup:
    """A dashed horizontal line with its name."""
    y, right = frame.down(value), WIDTH - RIGHT
    line = Markup('<line class="reference" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(LEFT, right, y, y)
    # On the left, where a falling curve is still high above it.
    text = Markup('<text class="reference-name" x="{}" y="{:.1f}">{}</text>')
    return line + text.format(LEFT + 6, y - 6 if y > TOP + 24 else y + 18, name)


def polyline(frame: Frame, points: Sequence[Point], kind: str) -> Markup:
    """A line through the points, of that class of the style sheet."""
    return Markup('<polyline class="{}" points="{}"/>').format(kind, frame.path(thin_out(points)))


def _hover(frame: Frame, point: Point, x_label: str) -> Markup:
    dot = Markup('<circle class="hover" cx="{:.1f}" cy="{:.1f}" r="6"><title>{} {}: {}</title></circle>')
    x, y = point
    return dot.format(frame.across(x), frame.down(y), x_label, compact(x), compact(y))
