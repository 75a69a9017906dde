"""Samples as the model sees them, and what a data set consists of, as one self-contained HTML page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from vlmpipe.report.load import count
from vlmpipe.report.pages import STYLE, page_template
from vlmpipe.report.samples import SMALL_PIXELS, EmbeddedImage
from vlmpipe.trainer import __version__
from vlmpipe.trainer.data.prepare.inspect import InspectedSample
from vlmpipe.trainer.data.prepare.overview import Overview, SourceOverview

if TYPE_CHECKING:
    from vlmpipe.report.inspection.seen_images import SeenImages

SHOWN_IMAGES = 24  # of a sample
SIDE_PIXELS = 336  # a longer image is scaled down
BINS = 24


@dataclass(frozen=True)
class Card:
    """A sample on the page."""

    sample: InspectedSample
    images: tuple[EmbeddedImage, ...]
    more_images: int
    tokens: int
    labels: int


def card_of(sample: InspectedSample, seen: SeenImages) -> Card:
    """The sample with the images that the model is given."""
    seen_images = seen(sample.images) if sample.images else []
    images = [as_png(image) for image in seen_images[:SHOWN_IMAGES]]
    if sample.images and not seen_images:
        images = [EmbeddedImage(problem="This model's pixel values have a form of their own and cannot be shown.")]
    labels = sum(piece.tokens for piece in sample.pieces if piece.is_label)
    return Card(sample, tuple(images), max(0, len(seen_images) - SHOWN_IMAGES), len(sample.encoded.input_ids), labels)


def as_png(image: Image.Image) -> EmbeddedImage:
    """The image without loss, since the page shows the model's very input; `title` has its true size."""
    tiny = max(image.size) <= SMALL_PIXELS
    small = image.copy()
    small.thumbnail((SIDE_PIXELS, SIDE_PIXELS))
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    data_uri = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return EmbeddedImage(data_uri, *image.size, tiny)


def build_page(name: str, cards: Sequence[Card], overview: Overview | None) -> str:
    """The page's HTML. `overview`: None where the data is not prepared."""
    return page_template("vlmpipe.report.inspection.page", "page.html.j2").render(
        style=Markup(STYLE),
        name=name,
        cards=cards,
        sources=_rows(overview) if overview else [],
        shared=overview.shared if overview else [],
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
    )


def _rows(overview: Overview) -> list[dict[str, object]]:
    """Return counts, shares and charts of each source."""
    tokens = sum(source.tokens for source in overview.sources) or 1
    drawn = sum(source.epoch_tokens for source in overview.sources) or 1
    return [
        {
            "name": source.name,
            "samples": source.samples,
            "tokens": source.tokens,
            "share": source.tokens / tokens,
            "epoch_share": source.epoch_tokens / drawn,
            "lengths": _lengths(source),
            "images": _bars(
                source.images, [*map(str, range(len(source.images) - 1)), f"{len(source.images) - 1} or more"]
            ),
        }
        for source in overview.sources
    ]


def _lengths(source: SourceOverview) -> dict[str, object]:
    lengths = source.lengths
    longest = max(1, int(np.flatnonzero(lengths).max(initial=1)))
    bars, edges = np.histogram(np.arange(len(lengths)), BINS, (0, longest), weights=lengths)
    median = int(np.searchsorted(np.cumsum(lengths), (source.samples + 1) // 2))
    return {
        "heights": (bars / max(1, bars.max())).tolist(),
        "titles": [
            f"{count(round(low))} to {count(round(high))} tokens: {count(int(bar))}"
            for low, high, bar in zip(edges, edges[1:], bars, strict=False)
        ],
        "high": count(longest),
        "label": f"Half of the samples have at most {count(median)} tokens, the longest has {count(longest)}.",
    }


def _bars(counts: NDArray[np.int64], names: Sequence[str]) -> list[tuple[str, int, float]]:
    """Name, number and share of each that occurs."""
    total = int(counts.sum()) or 1
    return [(name, int(n), n / total) for name, n in zip(names, counts, strict=True) if n]
