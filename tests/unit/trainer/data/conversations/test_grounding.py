"""Boxes stand in the coordinates of the model family, of the image as it is resized."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vlmpipe.trainer.data.accounting.keys import Record
from vlmpipe.trainer.data.conversations.grounding import with_boxes, with_names
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import Box, Turn
from vlmpipe.trainer.models.image_tokens import SQUARES, ImageForm
from vlmpipe.trainer.sizing.image_grids import ImageGrids, VideoSize

GRIDS = ImageGrids(14, 2, 4 * 28**2, 64 * 28**2)
RESIZED, THOUSANDTHS = ImageForm(grids=GRIDS, boxes="resized"), ImageForm(grids=GRIDS, boxes="thousandths")
SIDES = st.integers(20, 2000)


def written(corners: list[float], size: tuple[int, int], form: ImageForm, *, is_share: bool = False) -> list[int]:
    box = Box(tuple(corners), 0, is_share)
    (turn,) = with_boxes([Turn("Where?", "<bbox>")], [box], [size], form.box_area)
    found: list[int] = json.loads(turn.answer)
    return found


def test_a_box_has_the_pixels_of_the_resized_image_or_thousandths_of_its_sides() -> None:
    """640 x 480 is resized to 252 x 168, by the rule of Qwen2-VL with these bounds: 64 tokens of 28 x 28 pixels."""
    assert GRIDS.of(640, 480) == (12, 18)
    assert written([320, 120, 640, 480], (640, 480), RESIZED) == [126, 42, 252, 168]
    assert written([320, 120, 640, 480], (640, 480), THOUSANDTHS) == [500, 250, 1000, 1000]
    assert written([0.5, 0.25], (640, 480), RESIZED, is_share=True) == [126, 42]


@given(SIDES, SIDES, st.lists(st.floats(0, 1), min_size=4, max_size=4), st.sampled_from([RESIZED, THOUSANDTHS]))
def test_shares_and_pixels_of_one_box_are_written_alike(
    width: int, height: int, shares: list[float], form: ImageForm
) -> None:
    left, right = sorted(shares[::2])
    top, bottom = sorted(shares[1::2])
    box = [left * width, top * height, right * width, bottom * height]
    found = written(box, (width, height), form)
    area = form.box_area((width, height))
    assert area and found == written([left, top, right, bottom], (width, height), form, is_share=True)
    assert all(0 <= one <= area[place % 2] for place, one in enumerate(found))
    assert [abs(one - share * area[place % 2]) <= 0.501 for place, (one, share) in enumerate(
        zip(found, [left, top, right, bottom], strict=True))] == [True] * 4  # fmt: skip


@given(SIDES, SIDES, st.floats(1.5, 1e6))
def test_a_box_outside_its_image_is_rejected(width: int, height: int, beyond: float) -> None:
    with pytest.raises(RejectedError, match=f"outside its image of {width} x {height} pixels") as rejected:
        written([0, 0, width + beyond, height], (width, height), RESIZED)
    assert rejected.value.code == RejectCode.CONV_OBJECTS


@pytest.mark.parametrize("form", [SQUARES, ImageForm(grids=GRIDS)])
def test_a_family_without_a_known_form_of_boxes_is_refused_in_words(form: ImageForm) -> None:
    with pytest.raises(RejectedError, match="write them into the text"):
        written([0, 0, 1, 1], (30, 30), form)


def test_a_video_has_no_boxes() -> None:
    with pytest.raises(RejectedError, match="not known"):
        written([0, 0, 1, 1], VideoSize(30, 30, 2, 0.5), RESIZED)


def named(objects: Any, question: str, images: int = 1) -> tuple[tuple[Turn, ...], tuple[Box, ...]]:
    record = Record({"objects": objects})
    found = with_names(record, [Turn(question, "<bbox>")], images, 0)
    assert "objects" in record.used
    return found


def test_names_are_text_and_boxes_wait_for_the_size() -> None:
    objects = {"ref": ["a cat", "a dog"], "bbox": [[1, 2, 3, 4], [5, 6]], "image_id": [1, 0]}
    (turn,), boxes = named(objects, "<ref-object> or <ref-object>, at <bbox>?", images=2)
    assert (turn.question, turn.answer) == ("a cat or a dog, at <bbox>?", "<bbox>")
    assert boxes == (Box((1.0, 2.0, 3.0, 4.0), 1, False), Box((5.0, 6.0), 0, False))


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ({"bbox": []}, "1 <bbox> marks for 0 in objects.bbox"),
        ({"bbox": [[1, 2, 3, 4]], "ref": ["a"]}, "0 <ref-object> marks for 1"),
        ({"bbox": [[1, 2, 3]]}, "not \\[left, top, right, bottom\\]"),
        ({"bbox": [[1, 2, "3", 4]]}, "in numbers"),
        ({"bbox": [[1, 2, float("nan"), 4]]}, "in numbers"),
        ({"bbox": [[3, 2, 1, 4]]}, "is not left, top, right, bottom"),
        ({"bbox": [[1, 2, 3, 4]], "bbox_type": "norm1000"}, "not real or norm1"),
        ({"bbox": [[1, 2, 3, 4]], "image_id": [1]}, "has 1, and there are 1 images, counted from 0"),
        ({"bbox": [[1, 2, 3, 4]], "image_id": [0, 0]}, "no list of a number for each box"),
        ([{"caption": "a", "bbox": [1, 2, 3, 4]}], "'objects' is a list"),
        ({"bbox": "1,2,3,4"}, "objects.bbox is a text"),
    ],
)
def test_objects_that_do_not_fit_are_rejected_in_words(objects: Any, words: str) -> None:
    with pytest.raises(RejectedError, match=words) as rejected:
        named(objects, "Where?")
    assert rejected.value.code == RejectCode.CONV_OBJECTS


def test_what_else_objects_have_is_listed() -> None:
    record = Record({"objects": {"bbox": [[1, 2, 3, 4]], "mask": "x"}})
    with_names(record, [Turn("Where?", "<bbox>")], 1, 0)
    assert [one.name for one in record.unread(has_media=True)] == ["objects.mask"]


@given(st.lists(st.sampled_from(["<bbox>", "<ref-object>", " and "]), max_size=8))
def test_every_mark_is_filled_in_order(pieces: list[str]) -> None:
    boxes, names = pieces.count("<bbox>"), pieces.count("<ref-object>")
    assume(boxes or names)
    objects = {"ref": [f"name {n}" for n in range(names)], "bbox": [[n, n] for n in range(boxes)]}
    turns, found = with_names(Record({"objects": objects}), [Turn("".join(pieces), "")], 1, 0)
    (turn,) = with_boxes(turns, found, [(1000, 1000)], THOUSANDTHS.box_area)
    assert re.findall(r"\[(\d+), \1\]", turn.question) == [str(n) for n in range(boxes)]
    assert re.findall(r"name (\d+)", turn.question) == [str(n) for n in range(names)]
