"""What a prediction is asked where its source is one that training reads."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.support.trainer.tiny_runs import TINY
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ConfigError, DataError
from vlmpipe.trainer.evaluation.prediction import questions as module
from vlmpipe.trainer.evaluation.prediction.answer_file import ToAnswer
from vlmpipe.trainer.evaluation.prediction.questions import read_questions

DATA = JobConfig.model_validate(TINY | {"run": {"run_id": "one", "root_uri": "/runs"}}).data


def png(width: int = 8) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, 8), "red").save(buffer, "PNG")
    return buffer.getvalue()


def llava(image: str, *texts: str) -> dict[str, Any]:
    turns = [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(texts)]
    return {"id": image, "image": image, "conversations": turns}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(png())
    return tmp_path


def asked(found: list[ToAnswer]) -> list[tuple[str, str]]:
    return [(one.image.name, one.question) for one in found]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_each_turn_of_a_conversation_is_asked_by_itself(suffix: str, folder: Path) -> None:
    rows = [llava("a.png", "<image>\nHow red?", "Very.", "Why?", "It is."), llava("b.png", "<image>\nHow wide?", "8.")]
    file = folder / f"asked{suffix}"
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(json.dumps(rows) if suffix == ".json" else lines)
    found = read_questions(str(file), "", DATA)
    assert asked(found) == [("a.png", "How red?"), ("a.png", "Why?"), ("b.png", "How wide?")]
    assert all(one.read and one.read() == png() and not one.problem for one in found)
    (folder / "b.png").write_bytes(png(9))
    assert {one.stamp for one in found}.isdisjoint(one.stamp for one in read_questions(file, "", DATA))


def test_a_question_is_asked_after_the_system_text_of_its_conversation(folder: Path) -> None:
    row = llava("a.png", "<image>\nHow red?", "Very.", "Why?", "It is.")
    row["conversations"].insert(0, {"from": "system", "value": "In one word."})
    (folder / "asked.json").write_text(json.dumps([row]))
    assert [one.system for one in read_questions(folder / "asked.json", "", DATA)] == ["In one word."] * 2


def test_images_may_lie_in_a_table(folder: Path) -> None:
    rows = [{"image": {"bytes": png(), "path": "a.png"}, "question": "How red?", "answer": "Very."}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "set.parquet")
    (one,) = read_questions(folder / "set.parquet", "", DATA)
    assert one.question == "How red?" and one.read and one.read() == png()


def test_a_sample_that_cannot_be_asked_about_is_a_row_with_its_reason(folder: Path) -> None:
    two = llava("a.png", "<image><image>\nWhich?", "One.") | {"image": ["a.png", "b.png"]}
    rows = [llava("a.png", "<image>\nHow red?", "Very."), two, {"id": "none"}]
    (folder / "asked.json").write_text(json.dumps(rows))
    found = read_questions(folder / "asked.json", "", DATA)
    assert [one.problem.partition("has ")[2] for one in found[:2]] == ["", "2 images; expected one"]
    assert len(found) == 3 and found[2].problem


@pytest.mark.parametrize("more", [{}, {"answers": ["very", "quite"]}, {"box": [1, 2, 3, 4]}])
def test_a_table_that_names_images_stays_a_table(more: dict[str, Any], folder: Path) -> None:
    (folder / "asked.jsonl").write_text(json.dumps({"image": "a.png", "question": "How red?"} | more) + "\n")
    assert read_questions(folder / "asked.jsonl", "", DATA) == [ToAnswer(folder / "a.png", "How red?")]


def test_options_are_asked_with_their_question(folder: Path) -> None:
    row = {"image": "a.png", "question": "How red?", "options": ["very", "hardly"], "answer": "A"}
    (folder / "asked.jsonl").write_text(json.dumps(row) + "\n")
    assert asked(read_questions(folder / "asked.jsonl", "", DATA)) == [("a.png", "How red?\nA. very\nB. hardly")]


def test_built_in_sets_can_be_asked_about() -> None:
    found = read_questions("builtin:digits", "", DATA)
    assert len(found) > 100 and found[0].question and found[0].read and found[0].read().startswith(b"\x89PNG")


def test_too_many_images_in_tables_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"image": {"bytes": png(), "path": "a.png"}, "question": "How red?", "answer": "Very."}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "set.parquet")
    monkeypatch.setattr(module, "MAX_HELD_BYTES", 10)
    with pytest.raises(ConfigError, match="of images in its tables"):
        read_questions(folder / "set.parquet", "", DATA)


@pytest.mark.parametrize(("name", "content"), [("notes.txt", "no data"), ("empty.json", "[]")])
def test_what_is_no_source_is_named(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises((ConfigError, DataError), match=name):
        read_questions(tmp_path / name, "", DATA)
