"""Evaluation answers that the report shows, with their images as data URIs."""

from __future__ import annotations

import base64
import io
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from vlmpipe.trainer.data.sample import Split
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.prepared_files import open_prepared, why_unread
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.errors import UserError

THUMBNAIL_PIXELS = 240  # longer side; twice what a card shows, for dense screens
MAX_PIXELS = 50_000_000  # larger images are not decoded, which would take too much memory
SMALL_PIXELS = 100  # up to this side an image is shown enlarged, with its pixels visible
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # what Pillow raises for damaged files
SHOWN_IMAGES = 2  # on a card
# Bounds of the list of all predictions, which keep the page below about 8 MB and its images cheap to read.
FIELDS = ("correct", "slice", "question", "answer", "prediction", "id")
TEXT_CHARACTERS, TEXT_BYTES = 500, 4_000_000
LISTED_PIXELS, LISTED_IMAGES, IMAGE_BYTES = 72, 100, 1_000_000


@dataclass(frozen=True)
class EmbeddedImage:
    """A thumbnail, or the reason why there is none."""

    data_uri: str = ""
    width: int = 0
    height: int = 0
    pixelated: bool = False
    problem: str = ""


@dataclass(frozen=True)
class PredictionBrowser:
    """Data of the list of predictions: FIELDS and the index of an image in each line."""

    lines: list[list[object]]
    images: list[tuple[str, int, int]]  # data URI, width, height
    left_out: int
    shortened: bool

    def as_json(self, run_id: str) -> str:
        return json.dumps({"name": run_id, "fields": FIELDS, "lines": self.lines, "images": self.images})


def choose(predictions: Sequence[dict[str, object]], most: int) -> list[dict[str, object]]:
    """Half wrong and half right predictions, spread over slices and images; deterministic."""
    wrong = [line for line in predictions if not line.get("correct")]
    right = [line for line in predictions if line.get("correct")]
    num_wrong = min(len(wrong), max(most // 2, most - len(right)))
    return spread(wrong, num_wrong) + spread(right, most - num_wrong)


def spread(lines: Sequence[dict[str, object]], most: int) -> list[dict[str, object]]:
    """Take from each slice in turn, if possible a sample not taken yet."""
    slices: dict[object, list[dict[str, object]]] = defaultdict(list)
    for line in lines:
        slices[line.get("slice")].append(line)
    chosen: list[dict[str, object]] = []
    shown: set[object] = set()
    while len(chosen) < most and any(slices.values()):
        for waiting in slices.values():
            if waiting and len(chosen) < most:
                line = next((line for line in waiting if line.get("id") not in shown), waiting[0])
                waiting.remove(line)
                shown.add(line.get("id"))
                chosen.append(line)
    return chosen


class PreparedImages:
    """Reads the images of samples from the shards of the prepared data."""

    def __init__(self, prepared_uri: str) -> None:
        try:
            self._index, self._problem = Index.load(prepared_uri), ""
        except UserError as error:
            self._problem = f"The index cannot be read: {why_unread(error)}."
            return
        self._reader = ShardReader.open(open_prepared(prepared_uri))

    def embedded(self, identity: object, most: int, pixels: int) -> tuple[list[EmbeddedImage], int]:
        """Thumbnails of the first `most` images of a validation sample, or one with the reason why there are none; and
        the number left out."""
        images = self._read("eval", identity)
        if isinstance(images, EmbeddedImage):
            return [images], 0
        return [thumbnail(image, pixels) for image in images[:most]], max(0, len(images) - most)

    def embedded_image(self, split: Split, identity: object, place: object) -> EmbeddedImage:
        """Thumbnail of one image of a sample of any split."""
        images = self._read(split, identity)
        if isinstance(images, EmbeddedImage):
            return images
        if isinstance(place, int) and 0 <= place < len(images):
            return thumbnail(images[place])
        return EmbeddedImage(problem="The sample has no such image any more.")

    def _read(self, split: Split, identity: object) -> Sequence[bytes] | EmbeddedImage:
        """The images of a sample, or a placeholder with the reason why they cannot be read."""
        if self._problem:
            return EmbeddedImage(problem=self._problem)
        samples = self._index.split(split)
        number = samples.number(str(identity))
        if number is None:
            return EmbeddedImage(problem="This sample is not in the prepared data any more.")
        try:
            return self._reader.images(samples.sample_location(number))
        except UserError as error:
            return EmbeddedImage(problem=f"The image cannot be read: {error.found}.")


def sample_cards(images: PreparedImages, lines: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The chosen lines with their images."""
    cards = []
    for line in lines:
        shown, more = images.embedded(line.get("id"), SHOWN_IMAGES, THUMBNAIL_PIXELS)
        cards.append({"line": line, "images": shown, "more_images": more})
    return cards


def prediction_browser(images: PreparedImages, predictions: Sequence[dict[str, object]]) -> PredictionBrowser:
    """Lines for the page's own list, wrong answers first, as many as TEXT_BYTES hold."""
    drawn: list[tuple[str, int, int]] = []
    places: dict[str, int | None] = {}
    lines: list[list[object]] = []
    spare_bytes, image_bytes, shortened = TEXT_BYTES, IMAGE_BYTES, False
    for line in sorted(predictions, key=lambda line: bool(line.get("correct"))):
        texts = [str(line.get(field, "")) for field in FIELDS[1:]]
        texts[1] = texts[1].replace("<image>", "").strip()
        shown = [text if len(text) <= TEXT_CHARACTERS else f"{text[:TEXT_CHARACTERS]}…" for text in texts]
        spare_bytes -= len(json.dumps(shown))
        if spare_bytes < 0:
            break
        shortened |= shown != texts
        identity = shown[-1]
        if identity not in places and len(places) < LISTED_IMAGES and image_bytes > 0:
            embedded, _ = images.embedded(identity, 1, LISTED_PIXELS)  # none of a sample of text alone
            first = next((image for image in embedded if image.data_uri), None)
            places[identity] = len(drawn) if first else None
            if first:
                drawn.append((first.data_uri, first.width, first.height))
                image_bytes -= len(first.data_uri)
        lines.append([bool(line.get("correct")), *shown, places.get(identity)])
    return PredictionBrowser(lines, drawn, len(predictions) - len(lines), shortened)


def thumbnail(data: bytes, pixels: int = THUMBNAIL_PIXELS) -> EmbeddedImage:
    """A small copy of an encoded image, or why there is none."""
    try:
        image = Image.open(io.BytesIO(data), formats=["PNG", "JPEG", "WEBP"])
        if image.width * image.height > MAX_PIXELS:
            return EmbeddedImage(problem=f"The image has {image.width} x {image.height} pixels, too many to show.")
        tiny = max(image.size) <= SMALL_PIXELS
        image.draft("RGB", (pixels, pixels))  # a JPEG decodes straight to about this size
        small = image.convert("RGB")
    except UNREADABLE:
        return EmbeddedImage(problem="The image is damaged.")
    small.thumbnail((pixels, pixels))
    buffer = io.BytesIO()
    small.save(buffer, "PNG" if tiny else "JPEG", **({} if tiny else {"quality": 82}))
    kind = "png" if tiny else "jpeg"
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return EmbeddedImage(f"data:image/{kind};base64,{encoded}", small.width, small.height, tiny)
