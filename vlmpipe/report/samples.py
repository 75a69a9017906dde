"""Selects the evaluation questions that the report shows, with their images as data URIs."""

from __future__ import annotations

import base64
import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from trainer.data.shards.index import Index, SplitIndex
from trainer.data.shards.prepared_files import open_prepared
from trainer.data.shards.tar import ShardReader
from trainer.errors import UserError

THUMBNAIL_PIXELS = 240  # longer side; twice what a card shows, for dense screens
MOST_PIXELS = 50_000_000  # a picture that would need more memory than that is not decoded
SMALL_PIXELS = 100  # up to this side a picture is shown enlarged, with its pixels visible
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # what Pillow raises for damaged files
SHOWN_IMAGES = 2  # pictures of one sample that a card shows


@dataclass(frozen=True)
class Picture:
    """A thumbnail, or the reason why there is none."""

    data_uri: str = ""
    width: int = 0
    height: int = 0
    pixelated: bool = False
    problem: str = ""


@dataclass(frozen=True)
class SampleCard:
    """One question with its answer, prediction and pictures."""

    line: dict[str, Any]
    pictures: tuple[Picture, ...]
    more_pictures: int = 0


def choose(predictions: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Half wrong and half right predictions, spread over slices and pictures; the same ones for the same input."""
    wrong = [line for line in predictions if not line.get("correct")]
    right = [line for line in predictions if line.get("correct")]
    num_wrong = min(len(wrong), max(most // 2, most - len(right)))
    return _spread(wrong, num_wrong) + _spread(right, most - num_wrong)


def _spread(lines: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Take from each slice in turn, and from each slice a sample not shown yet where there is one."""
    slices: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        slices[line.get("slice")].append(line)
    chosen: list[dict[str, Any]] = []
    shown: set[Any] = set()
    while len(chosen) < most and any(slices.values()):
        for waiting in slices.values():
            if waiting and len(chosen) < most:
                line = next((line for line in waiting if line.get("id") not in shown), waiting[0])
                waiting.remove(line)
                shown.add(line.get("id"))
                chosen.append(line)
    return chosen


def sample_cards(prepared_uri: str, lines: Sequence[dict[str, Any]]) -> list[SampleCard]:
    """The chosen lines with their pictures, read from the shards of the prepared data."""
    try:
        held_out = Index.load(prepared_uri).split("eval")
    except UserError as error:
        return [SampleCard(line, (Picture(problem=f"The index cannot be read: {error.found}."),)) for line in lines]
    reader = ShardReader.open(open_prepared(prepared_uri))
    numbers = {identity: number for number, identity in enumerate(held_out.ids)}
    return [_card(line, held_out, numbers.get(str(line.get("id"))), reader) for line in lines]


def _card(line: dict[str, Any], held_out: SplitIndex, number: int | None, reader: ShardReader) -> SampleCard:
    if number is None:
        return SampleCard(line, (Picture(problem="This sample is not in the prepared data any more."),))
    place = held_out.sample_location(number)
    try:
        images = reader.images(place)
    except UserError as error:
        return SampleCard(line, (Picture(problem=f"The picture cannot be read: {error.found}."),))
    pictures = tuple(thumbnail(image) for image in images[:SHOWN_IMAGES])
    return SampleCard(line, pictures, len(images) - len(pictures))


def thumbnail(data: bytes) -> Picture:
    """A small copy of an encoded picture, or why there is none."""
    try:
        image = Image.open(io.BytesIO(data), formats=["PNG", "JPEG"])
        if image.width * image.height > MOST_PIXELS:
            return Picture(problem=f"The picture has {image.width} x {image.height} pixels, too many to show.")
        tiny = max(image.size) <= SMALL_PIXELS
        image.draft("RGB", (THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))  # a JPEG decodes straight to about this size
        small = image.convert("RGB")
    except UNREADABLE:
        return Picture(problem="The picture is damaged.")
    small.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    buffer = io.BytesIO()
    small.save(buffer, "PNG" if tiny else "JPEG", **({} if tiny else {"quality": 82}))
    kind = "png" if tiny else "jpeg"
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return Picture(f"data:image/{kind};base64,{encoded}", small.width, small.height, tiny)
