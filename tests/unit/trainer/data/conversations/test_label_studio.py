"""Label Studio's JSON export: tasks, their annotations and files as samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.data.prepared import llava_folder
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.rejects import Reject, RejectCode
from vlmpipe.trainer.data.sample import Sample, Turn
from vlmpipe.trainer.data.sources import open_source


def result(name: str, kind: str, **value: Any) -> dict[str, Any]:
    return {"id": "r1", "from_name": name, "to_name": "image", "type": kind, "origin": "manual", "value": value}


def task(number: int, *results: dict[str, Any], **data: Any) -> dict[str, Any]:
    annotation = {"id": 7, "completed_by": 1, "result": list(results), "was_cancelled": False, "ground_truth": False}
    content = {"image": f"/data/local-files/?d=images/{number}.png"} | data
    return {"id": number, "annotations": [annotation], "predictions": [], "data": content, "meta": {}, "project": 1}


def read(folder: Path, *tasks: dict[str, Any]) -> list[Sample | Reject]:
    path = folder / "export.json"
    path.write_text(json.dumps(tasks))
    return list(open_source(DataConfig(source=str(path), sequence_length=100)))


def test_controls_are_turns_about_the_tasks_image(tmp_path: Path) -> None:
    images, _ = llava_folder(tmp_path, 2)
    answer, kind = result("answer", "textarea", text=["A cat."]), result("kind", "choices", choices=["photo", "dark"])
    asked, captioned = read(tmp_path, task(1, answer, kind, question="What is it?", slice="cats"), task(0, answer))
    assert isinstance(asked, Sample) and asked.id == "1"
    first, second = Turn("<image>\nWhat is it?", "A cat.", slice="cats"), Turn("kind", "photo, dark", slice="cats")
    assert asked.turns == (first, second)
    assert [image.read() for image in asked.images] == [(images / "1.png").read_bytes()]
    assert isinstance(captioned, Sample) and captioned.turns == (Turn("<image>\nDescribe this image.", "A cat."),)


def test_the_ground_truth_is_taken_before_others_and_cancelled_ones_never(tmp_path: Path) -> None:
    llava_folder(tmp_path, 1)
    one = task(0, result("answer", "textarea", text="First."))
    cancelled = one["annotations"][0] | {"was_cancelled": True}
    truth = cancelled | {"was_cancelled": False, "ground_truth": True}
    truth["result"] = [result("answer", "number", number=3)]
    one["annotations"] = [cancelled, one["annotations"][0], truth]
    (found,) = read(tmp_path, one)
    assert isinstance(found, Sample) and found.turns[0].answer == "3"


def test_uploads_and_several_images(tmp_path: Path) -> None:
    llava_folder(tmp_path / "upload", 2)
    pages = ["/data/upload/images/0.png", "/data/upload/images/1.png"]
    (found,) = read(tmp_path, task(0, result("answer", "textarea", text="Two."), image=None, pages=pages))
    assert isinstance(found, Sample) and found.turns[0].question.startswith("<image>\n<image>\n")
    assert [image.name for image in found.images] == ["upload/images/0.png", "upload/images/1.png"]


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], "an annotation without a result"),
        ([result("box", "rectanglelabels", rectanglelabels=["cat"], x=1)], "a result of type 'rectanglelabels'"),
    ],
)
def test_what_is_no_answer_is_rejected(tmp_path: Path, results: list[dict[str, Any]], message: str) -> None:
    unlabelled = task(1) | {"annotations": []}
    found, none = read(tmp_path, task(0, *results), unlabelled)
    assert isinstance(found, Reject) and found.code == RejectCode.RECORD_FORM and message in found.message
    assert isinstance(none, Reject) and none.message == "a task without a submitted annotation"
