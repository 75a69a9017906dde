"""Readers of benchmarks' files: what they read, and one sentence for a file of another format or version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.trainer.benchmark_files import contents, picture, write
from vlmpipe.trainer.config.benchmarks import FORMATS, BenchmarkConfig, BenchmarkFormat
from vlmpipe.trainer.errors import DataError, ExitCode
from vlmpipe.trainer.evaluation.benchmarks.readers import read_benchmark

MAX_BYTES = 1 << 20


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_is_read_with_its_answers_and_images(tmp_path: Path, form: BenchmarkFormat) -> None:
    first, second, *copies = read_benchmark(write(tmp_path, form), MAX_BYTES)
    assert (first.image.read(), second.image.read()) == (picture(1), picture(2))
    expected: dict[BenchmarkFormat, tuple[str, ...]] = {
        "vqav2": ("red",) * 9 + ("grey",),
        "textvqa": ("red",) * 9 + ("grey",),
        "pope": ("yes",),
        "mmbench": ("A",),
        "coco-captions": ("A red wall.", "One red wall."),
    }
    assert first.answers == expected.get(form, ("red",))
    assert first.slice == {"vqav2": "other", "mmbench": "colour"}.get(form, "all")
    if form == "mmbench":
        assert first.text == (
            "Which colour is it?\nA. red\nB. blue\nAnswer with the option's letter from the given choices directly."
        )
        assert second.text.startswith("Look.\nWhich colour")
        assert [(copy.id, copy.group, copy.image.read()) for copy in copies] == [("1000001", "1", picture(1))]
    elif form == "coco-captions":
        assert first.text == "Describe the image in one sentence."
    else:
        assert first.text == ("Is it red?" if form == "pope" else "Which colour is it?")


def test_a_prompt_of_ones_own_goes_around_the_question(tmp_path: Path) -> None:
    config = write(tmp_path, "pope").model_copy(update={"prompt": "{question}\nAnswer yes or no."})
    assert read_benchmark(config, MAX_BYTES)[0].text == "Is it red?\nAnswer yes or no."


def test_some_questions_are_evenly_spaced_and_rotations_stay_together(tmp_path: Path) -> None:
    many = [record | {"question_id": n} for n, record in enumerate(contents("pope")["questions.json"] * 10)]
    config = write(tmp_path / "a", "pope", {"questions.json": many}).model_copy(update={"max_questions": 4})
    assert [question.id for question in read_benchmark(config, MAX_BYTES)] == ["0", "5", "10", "15"]
    config = write(tmp_path / "b", "mmbench").model_copy(update={"max_questions": 2})
    assert [question.id for question in read_benchmark(config, MAX_BYTES)] == ["1", "1000001"]


def test_an_image_that_rows_write_out_again_is_one_image(tmp_path: Path) -> None:
    """Otherwise it counts twice where it looks like a training image, and its questions as about different ones."""
    rows = contents("mmbench")["questions.tsv"]
    written_out = [row | {"image": rows[0]["image"]} for row in rows]
    names = [
        one.image.name for one in read_benchmark(write(tmp_path, "mmbench", {"questions.tsv": written_out}), MAX_BYTES)
    ]
    assert len(names) == len(rows) > 1 and set(names) == {f"row {rows[0]['index']}"}


Change = Callable[[dict[str, Any]], Any]
WRONG: list[tuple[BenchmarkFormat, Change, str]] = [
    ("vqav2", lambda f: f["questions.json"]["info"].update(version="1.0"), "its 'version' is '1.0', not '2'"),
    ("vqav2", lambda f: f["questions.json"].update(task_type="Multiple-Choice"), "'task_type' is 'Multiple-Choice'"),
    ("vqav2", lambda f: f["annotations.json"].update(data_subtype="train2014"), "'train2014', not 'val2014'"),
    ("vqav2", lambda f: f["annotations.json"]["annotations"].pop(), "no annotation of question 2000"),
    ("vqav2", lambda f: f["annotations.json"]["annotations"][0]["answers"].pop(), "annotation 1 has 9 answers, not 10"),
    ("textvqa", lambda f: f["questions.json"].update(dataset_version="0.4"), "'dataset_version' is '0.4'"),
    ("textvqa", lambda f: f["questions.json"]["data"][1].pop("answers"), "question 2 has no 'answers'; its keys are"),
    ("docvqa", lambda f: f["questions.json"]["data"][0].update(answers=[]), "'answers' of question 1 is not a list of"),
    ("docvqa", lambda f: f["questions.json"].pop("data"), "the file has no 'data'"),
    ("pope", lambda f: f["questions.json"][1].update(label="maybe"), "'label' of line 2 is 'maybe', not 'yes' or 'no'"),
    ("pope", lambda f: f["questions.json"][1].update(question_id=1), "questions with the same id"),
    ("pope", lambda f: f["questions.json"][1].update(image="../2.png"), "an image that is not below"),
    ("pope", lambda f: f["questions.json"][1].update(image="3.png"), "1 of 2 images are missing, first 3.png"),
    ("pope", lambda f: f["questions.json"].clear(), "has no questions"),
    ("mmbench", lambda f: [row.pop("answer") for row in f["questions.tsv"]], "it has no column 'answer'"),
    ("mmbench", lambda f: f["questions.tsv"][2].update(image="9"), "'image' of row 3 is neither an image"),
    ("mmbench", lambda f: f["questions.tsv"][0].update(answer="C"), "'answer' of row 1 is 'C', not the letter"),
    ("chartqa", lambda f: f.update({"questions.json": {"data": []}}), "it is not a list"),
    ("chartqa", lambda f: f["questions.json"][0].update(label=14), "'label' of question 1 is a whole number"),
    ("coco-captions", lambda f: f["questions.json"]["annotations"][0].pop("caption"), "annotation 1 has no 'caption'"),
    ("coco-captions", lambda f: f["questions.json"]["images"].pop(), "it has 1 images"),
]


@pytest.mark.parametrize(("form", "change", "found"), WRONG)
def test_a_file_that_differs_is_one_sentence_that_names_the_place(
    tmp_path: Path, form: BenchmarkFormat, change: Change, found: str
) -> None:
    files = contents(form)
    change(files)
    with pytest.raises(DataError) as error:
        read_benchmark(write(tmp_path, form, files), MAX_BYTES)
    assert found in error.value.found
    assert error.value.code == ExitCode.DATA


def test_a_file_of_another_format_is_refused_by_every_reader(tmp_path: Path) -> None:
    for form in FORMATS:
        config = write(tmp_path / form, form)
        Path(config.uri).write_text('{"questions": "none"', encoding="utf-8")
        with pytest.raises(DataError, match=r"is not "):
            read_benchmark(config, MAX_BYTES)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"format": "vqav2"}, "found without annotations"),
        ({"annotations": "a.json"}, "found with annotations"),
        ({"images": ""}, "found without images"),
        ({"format": "mmbench"}, "found with images"),
        ({"prompt": "Yes or no?"}, "without {question}"),
        ({"name": "../x"}, "name"),
        ({"format": "vqa"}, "format"),
    ],
)
def test_a_section_that_cannot_be_meant_is_refused(changes: dict[str, str], found: str) -> None:
    good = {"name": "pope", "format": "pope", "uri": "a.json", "images": "images"}
    BenchmarkConfig.model_validate(good)
    with pytest.raises(ValidationError) as error:
        BenchmarkConfig.model_validate(good | changes)
    assert found in str(error.value)
