"""Visual tokens that a model with selection kept, as maps over the images."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

from vlmpipe.report.load import RunFiles, number
from vlmpipe.report.samples import EmbeddedImage, PreparedImages

SHOWN_MAPS = 8
MAP_PIXELS = 192  # longer side of a map
NUMBERS = {  # of evaluate.json -> title and unit
    "mean_image_tokens": ("Tokens an image", "kept, in the mean"),
    "all_image_tokens": ("All tokens an image", "before selection"),
    "exact_match_per_token": ("Exact match per token", "exact match / tokens an image"),
    "query_sensitivity": ("Query sensitivity", "1 - IoU of the selections of two questions about the same images"),
    "target_kept": ("Target kept", "share of the tokens that the answer is about"),
    "target_kept_untrained": ("Target kept before training", "with the module's first weights"),
}


def relevance_view(files: RunFiles, images: PreparedImages | None) -> dict[str, object] | None:
    """Numbers, and maps of some questions; None for a model that gets all tokens."""
    relevance = files.evaluation.relevance
    if relevance is None:
        return None
    rows = [
        {"title": title, "value": value, "unit": unit}
        for name, (title, unit) in NUMBERS.items()
        if (value := number(relevance.get(name))) is not None
    ]
    predictions = {(line.get("id"), line.get("turn")): line for line in files.predictions}
    cards = []
    for drawn_map in files.relevance_maps[:SHOWN_MAPS] if images else []:
        assert images is not None
        embedded, _ = images.embedded(drawn_map["id"], 1, MAP_PIXELS)
        if not embedded[0].problem:
            drawn = relevance_map(embedded[0], drawn_map["grids"][0], drawn_map["relevance"][0], drawn_map["cells"][0])
            cards.append({"map": drawn, "line": predictions.get((drawn_map["id"], drawn_map["turn"]), {})})
    return {"rows": rows, "cards": cards}


def relevance_map(
    image: EmbeddedImage, grid: Sequence[int], relevance: Sequence[float], cells: Sequence[Sequence[int]]
) -> Markup:
    """The image as SVG, dark where no relevance is, with a frame around each kept cell.

    cells: first row, first column, rows and columns of each.
    """
    rows, columns = grid
    unit = MAP_PIXELS / max(rows, columns)
    low, high = min(relevance), max(relevance)
    shades = [
        f'<rect x="{place % columns * unit:.1f}" y="{place // columns * unit:.1f}" width="{unit:.1f}" '
        f'height="{unit:.1f}" fill="#000" fill-opacity="{0.75 * (1 - (value - low) / max(high - low, 1e-9)):.2f}"/>'
        for place, value in enumerate(relevance)
    ]
    frames = [
        f'<rect x="{column * unit + 1:.1f}" y="{line * unit + 1:.1f}" width="{width * unit - 2:.1f}" '
        f'height="{height * unit - 2:.1f}" fill="none" stroke="#fff" stroke-width="2"/>'
        for line, column, height, width in cells
    ]
    wide, high_pixels = columns * unit, rows * unit
    style = "image-rendering:pixelated" if image.pixelated else ""
    return Markup(
        f'<svg viewBox="0 0 {wide:.0f} {high_pixels:.0f}" width="{wide:.0f}" height="{high_pixels:.0f}" role="img" '
        f'aria-label="{len(cells)} of {rows * columns} tokens are kept">'
        f'<image href="{escape(image.data_uri)}" width="{wide:.0f}" height="{high_pixels:.0f}" '
        f'preserveAspectRatio="none" style="{style}"/>{"".join(shades)}{"".join(frames)}</svg>'
    )
