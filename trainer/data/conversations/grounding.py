"""Boxes and names of ms-swift's `objects`, written where `<bbox>` and `<ref-object>` mark them.

Names are text of the record. A box is written once the image's size is known, in the coordinates of the model family.
Source: https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html (objects: ref, bbox, bbox_type,
image_id).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from vlmpipe.trainer.data.accounting.keys import Record
from vlmpipe.trainer.data.conversations.message_parts import kind_of, text
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import Box, Turn

OBJECTS = "objects"
BOX_MARK, NAME_MARK = "<bbox>", "<ref-object>"
MARKS = (BOX_MARK, NAME_MARK)
KEYS = frozenset({"ref", "bbox", "bbox_type", "image_id"})
POINT, BOX = 2, 4  # numbers
PIXELS, SHARES = "real", "norm1"  # values of bbox_type
MAX_OVERHANG = 1.0  # pixels that a box may reach beyond its image, for rounding; it is cut there

BoxArea = Callable[[tuple[int, int]], tuple[int, int] | None]  # size in pixels -> width and height in a box's units


def with_names(
    record: Record, turns: Sequence[Turn], images: int, videos: int
) -> tuple[tuple[Turn, ...], tuple[Box, ...]]:
    """The turns with names in place of `<ref-object>`, and the boxes that `<bbox>` stands for, in order.

    `objects` of records without such marks are left unread. Raises RejectedError where marks and objects differ.
    """
    holder = record.peek(OBJECTS)
    words = "".join(turn.question + turn.answer for turn in turns) if holder else ""
    boxes, names = (words.count(mark) for mark in MARKS)
    if not boxes and not names:
        return tuple(turns), ()
    record.took(OBJECTS)
    if not isinstance(holder, Mapping):
        raise _refused(f"'objects' is {kind_of(holder)}, not an object with ref and bbox")
    record.note(holder.keys() - KEYS, holder, OBJECTS, "'objects'")
    if videos:
        raise _refused("'objects' of videos are not read")
    named = [text(name, "objects.ref") for name in _list_of(holder, "ref", names, NAME_MARK)]
    odd = next((name for name in named if any(mark in name for mark in MARKS)), None)
    if odd is not None:
        raise _refused(f"objects.ref has a mark in {odd!r}")
    marked = _boxes(holder, _list_of(holder, "bbox", boxes, BOX_MARK), images)
    return (_filled(turns, NAME_MARK, iter(named)) if named else tuple(turns)), marked


def require_no_marks(turns: Sequence[Turn], *, are_filled: bool) -> None:
    """Raise RejectedError for a mark that no object stands for. are_filled: those of questions and answers are."""
    for turn in turns:
        for words in (turn.system, turn.thinking, *(() if are_filled else (turn.question, turn.answer))):
            if "<" in words and (mark := next((mark for mark in MARKS if mark in words), "")):
                raise _refused(f"{mark} without 'objects' that it stands for")


def with_boxes(
    turns: Sequence[Turn], boxes: Sequence[Box], sizes: Sequence[tuple[int, int]], area: BoxArea
) -> tuple[Turn, ...]:
    """The turns with `[left, top, right, bottom]`, or `[x, y]` of a point, in place of each `<bbox>`.

    Raises RejectedError for a box outside its image, and where the family has no known form of boxes.

    Args:
        sizes: (width, height) of each image in pixels, as it is shown.
        area: the size of an image in the coordinates of the model family; None where that is not known.
    """
    marks = sum((turn.question + turn.answer).count(BOX_MARK) for turn in turns)  # fewer where turns were dropped
    written = (_written(box, sizes, area) for box in boxes[:marks])
    return _filled(turns, BOX_MARK, written)


def _filled(turns: Sequence[Turn], mark: str, values: Iterator[str]) -> tuple[Turn, ...]:
    def fill(words: str) -> str:
        first, *others = words.split(mark)
        return first + "".join(next(values) + other for other in others)

    return tuple(replace(turn, question=fill(turn.question), answer=fill(turn.answer)) for turn in turns)


def _list_of(holder: Mapping[str, object], key: str, marks: int, mark: str) -> list[object]:
    values = holder.get(key)
    values = [] if values is None else values
    if not isinstance(values, list):
        raise _refused(f"objects.{key} is {kind_of(values)}, not a list")
    if len(values) != marks:
        raise _refused(f"{marks} {mark} marks for {len(values)} in objects.{key}")
    return values


def _boxes(holder: Mapping[str, object], boxes: Sequence[object], images: int) -> tuple[Box, ...]:
    kind = holder.get("bbox_type")
    if kind not in (None, PIXELS, SHARES):
        raise _refused(f"objects.bbox_type is {kind!r}, not {PIXELS} or {SHARES}")
    of_images = holder.get("image_id") or [0] * len(boxes)
    if not isinstance(of_images, list) or len(of_images) != len(boxes):
        raise _refused("objects.image_id is no list of a number for each box")
    for number in of_images:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < images:
            raise _refused(f"objects.image_id has {number!r}, and there are {images} images, counted from 0")
    return tuple(Box(_corners(box), number, kind == SHARES) for box, number in zip(boxes, of_images, strict=True))


def _corners(box: object) -> tuple[float, ...]:
    values = box if isinstance(box, list) else []
    numbers = tuple(
        float(value)
        for value in values
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    )
    if len(numbers) != len(values) or len(numbers) not in (POINT, BOX):
        raise _refused(f"objects.bbox has {kind_of(box)}, not [left, top, right, bottom] or [x, y] in numbers")
    if len(numbers) == BOX and (numbers[0] > numbers[2] or numbers[1] > numbers[3]):
        raise _refused(f"the box {box} is not left, top, right, bottom")
    return numbers


def _written(box: Box, sizes: Sequence[tuple[int, int]], area: BoxArea) -> str:
    if box.image >= len(sizes):
        raise _refused(f"a box of image {box.image}, which the turns that are kept do not show")
    size = sizes[box.image]
    target = area(size)
    if target is None:
        message = f"{BOX_MARK}: how models of this family write boxes is not known: write them into the text"
        raise _refused(message)
    written = []
    for place, value in enumerate(box.corners):
        side, units = size[place % 2], target[place % 2]
        pixels = value * side if box.is_share else value
        over = 0.0 if box.is_share else MAX_OVERHANG
        if not -over <= pixels <= side + over:
            shown = f"{list(box.corners)} ({SHARES if box.is_share else 'pixels'})"
            raise _refused(f"the box {shown} is outside its image of {size[0]} x {size[1]} pixels")
        written.append(round(min(max(pixels, 0.0), side) / side * units))
    return str(written)


def _refused(message: str) -> RejectedError:
    return RejectedError(RejectCode.CONV_OBJECTS, message)
