"""Forecasts beside published runs: predicted over published speed of each, by `make bench-published`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.planner.published_runs import (
    Outcome,
    by_source,
    has_memory,
    is_inside,
    memory_outcome,
    outcomes,
    published_runs,
    published_text_runs,
    quartiles,
)

PICTURE = Path("docs/reference/forecasts.svg")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 420, 56, 24, 48
LEAST, MOST = 0.5, 2.0  # predicted over published, on a logarithmic axis
COLORS = {"A100": "#2a78b5", "H100": "#d1622b", "H200": "#4f8f3a", "B200": "#7d5bb0", "GB200": "#b0567d"}


def table(found: Iterable[Outcome]) -> list[str]:
    """A line for each run, the fastest forecast last."""
    rows = sorted(found, key=lambda one: one.ratio)
    return [
        f"{one.run.id:46} {one.predicted:12,.1f} {one.published:12,.1f} {one.unit:14} {one.ratio:5.2f}" for one in rows
    ]


def summary(name: str, found: Sequence[Outcome]) -> str:
    lower, median, upper = quartiles(one.ratio for one in found)
    ratios = [one.ratio for one in found]
    return (
        f"{name:34} {len(found):4} runs   median {median:.2f}   quartiles {lower:.2f} to {upper:.2f}   "
        f"all {min(ratios):.2f} to {max(ratios):.2f}"
    )


def summaries(runs: Sequence[Outcome], text_runs: Sequence[Outcome]) -> list[str]:
    both = [*runs, *text_runs]
    return [
        summary("published_runs.yaml", runs),
        summary("  of other sources than llm-foundry", [one for one in runs if one.run.source != "llm-foundry"]),
        summary("llm-foundry's further runs", text_runs),
        "inside the printed range, by source that no rate was fitted to:",
        *(f"  {source:32} {sum(map(is_inside, found)):4} of {len(found)}" for source, found in by_source(runs).items()),
        *(summary(gpu, [one for one in both if one.run.gpu.startswith(gpu)]) for gpu in COLORS),
    ]


def picture(runs: Sequence[Outcome], text_runs: Sequence[Outcome]) -> str:
    """Predicted over published speed by published tokens a second, as SVG. Filled: published_runs.yaml."""
    published = [one.published for one in (*runs, *text_runs) if one.unit.startswith("tokens")]
    least, most = math.log10(min(published)), math.log10(max(published))

    def x(value: float) -> float:
        return LEFT + 12 + (WIDTH - LEFT - 36) * (math.log10(value) - least) / (most - least)

    def y(ratio: float) -> float:
        share = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="Predicted over published training speed">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<rect x="{LEFT}" y="{y(1.25):.1f}" width="{WIDTH - LEFT - 12}" height="{y(0.8) - y(1.25):.1f}" '
        'fill="#e8f1e4"/>',
    ]
    for ratio in (0.5, 0.8, 1.0, 1.25, 2.0):
        color = "#444444" if ratio == 1 else "#bbbbbb"
        parts.append(f'<path d="M{LEFT} {y(ratio):.1f}H{WIDTH - 12}" stroke="{color}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(ratio) + 4:.1f}" text-anchor="end">{ratio:g}</text>')
    for power in range(math.ceil(least), math.floor(most) + 1):
        parts.append(f'<text x="{x(10**power):.1f}" y="{HEIGHT - 28}" text-anchor="middle">{10**power:,}</text>')
    for found, filled in ((text_runs, False), (runs, True)):
        for one in found:
            if not one.unit.startswith("tokens"):
                continue
            color = COLORS[one.run.gpu.partition("-")[0]]
            look = f'fill="{color}"' if filled else f'fill="none" stroke="{color}" stroke-opacity="0.5"'
            parts.append(
                f'<circle cx="{x(one.published):.1f}" cy="{y(one.ratio):.1f}" r="{4.5 if filled else 3}" {look}>'
                f"<title>{one.run.id}: {one.ratio:.2f}</title></circle>"
            )
    parts += [
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">published tokens/s a GPU</text>',
        f'<text x="{LEFT}" y="14">predicted over published speed; shaded: 0.8 to 1.25</text>',
        *(
            f'<text x="{WIDTH - 60 * (len(COLORS) - number)}" y="14" fill="{color}">● {gpu}</text>'
            for number, (gpu, color) in enumerate(COLORS.items())
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="a line for llm-foundry's further runs as well")
    parser.add_argument("--memory", action="store_true", help="memory of torchtitan's runs, by traces")
    parser.add_argument("--picture", action="store_true", help=f"write {PICTURE}")
    arguments = parser.parse_args()
    runs, text_runs = outcomes(), outcomes(published_text_runs())
    print(f"{'run':46} {'predicted':>12} {'published':>12} {'':14} ratio")
    print("\n".join(table([*runs, *text_runs] if arguments.all else runs)))
    print("\nNot predicted:")
    print("\n".join(f"{run.id:46} {run.why_not}" for run in published_runs() if run.why_not))
    print("", *summaries(runs, text_runs), sep="\n")
    if arguments.memory:
        print("\n".join(["", "Memory:", *table(memory_outcome(run) for run in published_runs() if has_memory(run))]))
    if arguments.picture:
        PICTURE.write_text(picture(runs, text_runs), encoding="utf-8")
        print(f"\nwrote {PICTURE}")


if __name__ == "__main__":
    main()
