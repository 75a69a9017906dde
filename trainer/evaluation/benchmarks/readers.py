"""Readers of benchmarks' question files.

Each returns the questions in the file's order and raises DataError for a file of another format or version, for one
without answers, and for images that are missing.
"""

from __future__ import annotations

import base64
import binascii
import io
import string
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from vlmpipe.trainer.config.benchmarks import BenchmarkConfig, BenchmarkFormat
from vlmpipe.trainer.data.rejects import RejectedError
from vlmpipe.trainer.data.sample import ImageRef
from vlmpipe.trainer.data.sources.image_files import ImageFiles
from vlmpipe.trainer.data.text_files.csv_rows import csv_rows
from vlmpipe.trainer.data.text_files.json_stream import BadJsonError, parse_json
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.evaluation.benchmarks.files import BenchmarkFile
from vlmpipe.trainer.evaluation.benchmarks.question import BenchmarkQuestion
from vlmpipe.trainer.evaluation.cider import MIN_IMAGES
from vlmpipe.trainer.storage import open_storage

PEOPLE = 10  # who answered each question of VQAv2 and TextVQA
CIRCULAR = 1_000_000  # MMBench: a question with its choices rotated k times has the index + k x CIRCULAR
LONGEST_INDEX = 64  # characters; a longer cell is an image
CAPTION_PROMPT = "Describe the image in one sentence."
CHOICE_PROMPT = "Answer with the option's letter from the given choices directly."
Item = TypeVar("Item")
FIND_IMAGE = Callable[[str], ImageRef]
Reader = Callable[[BenchmarkConfig, FIND_IMAGE], Iterator[BenchmarkQuestion]]


def read_benchmark(config: BenchmarkConfig, max_image_bytes: int) -> list[BenchmarkQuestion]:
    """The questions to ask, `config.max_questions` of them where that is set. max_image_bytes: of a stored image."""
    files = ImageFiles(open_storage(config.images or "."), max_image_bytes)

    def find(name: str) -> ImageRef:
        try:
            return files.reference(name)
        except RejectedError as error:
            raise DataError(f"{config.uri} names an image that is not below {config.images}: {name}") from error

    questions = list(READERS[config.format](config, find))
    if not questions:
        raise DataError(f"{config.uri} has no questions", expected=f"a file of format {config.format}")
    if len({question.id for question in questions}) < len(questions):
        raise DataError(f"{config.uri} has questions with the same id", expected="an id of each question")
    questions = chosen(questions, config.max_questions)
    _require_images(config, questions)
    return questions


def located(config: BenchmarkConfig) -> BenchmarkConfig:
    """Return the benchmark with absolute paths: a job may run in another folder."""
    paths = {name: getattr(config, name) for name in ("uri", "annotations", "images")}
    return config.model_copy(
        update={name: str(Path(uri).absolute()) for name, uri in paths.items() if uri and "://" not in uri}
    )


def chosen(questions: Sequence[BenchmarkQuestion], most: int) -> list[BenchmarkQuestion]:
    """Evenly spaced groups, about `most` questions in all (0: all), in order."""
    groups = list(dict.fromkeys(question.group or question.id for question in questions))
    count = min(len(groups), max(1, most * len(groups) // len(questions))) if most else len(groups)
    taken = {groups[number * len(groups) // count] for number in range(count)}
    return [question for question in questions if (question.group or question.id) in taken]


def _require_images(config: BenchmarkConfig, questions: Sequence[BenchmarkQuestion]) -> None:
    names = {question.image.name: question.image for question in questions}
    missing = [name for name, image in names.items() if image.size_bytes and not image.size_bytes()]
    if missing:
        raise DataError(
            f"benchmark {config.name}: {len(missing):,} of {len(names):,} images are missing, first {missing[0]}",
            expected=f"each image that {config.uri} names, in {config.images}",
            fix="set the benchmark's images to the folder that the file's image names are relative to",
        )


def _asked(config: BenchmarkConfig, question: str) -> str:
    return config.prompt.replace("{question}", question) if config.prompt else question


def _numbered(items: Sequence[Item], what: str) -> Iterator[tuple[str, Item]]:
    for number, item in enumerate(items, 1):
        yield f"{what} {number}", item


def read_vqav2(config: BenchmarkConfig, image: FIND_IMAGE) -> Iterator[BenchmarkQuestion]:
    """VQAv2 (Goyal et al. 2017): open-ended questions about COCO images, and annotations with ten answers each."""
    asked = BenchmarkFile(config.uri, "VQAv2's questions", VQAV2_QUESTIONS)
    answered = BenchmarkFile(config.annotations, "VQAv2's annotations", VQAV2_ANNOTATIONS)
    contents = asked.json(), answered.json()
    for file, content in zip((asked, answered), contents, strict=True):
        file.require(file.member(content, "info", dict, "the file"), "version", "2")
        file.require(content, "data_type", "mscoco")
    asked.require(contents[0], "task_type", "Open-Ended")
    split = asked.member(contents[0], "data_subtype", str, "the file")
    answered.require(contents[1], "data_subtype", split)
    annotations = {
        answered.member(record, "question_id", int, where): (where, record)
        for where, record in _numbered(answered.member(contents[1], "annotations", list, "the file"), "annotation")
    }
    for where, record in _numbered(asked.member(contents[0], "questions", list, "the file"), "question"):
        number = asked.member(record, "question_id", int, where)
        if number not in annotations:
            raise answered.wrong(f"it has no annotation of question {number}")
        place, annotation = annotations[number]
        people = answered.member(annotation, "answers", list, place)
        answers = tuple(answered.member(person, "answer", str, f"an answer of {place}") for person in people)
        if len(answers) != PEOPLE:
            raise answered.wrong(f"{place} has {len(answers)} answers, not {PEOPLE}")
        yield BenchmarkQuestion(
            str(number),
            _asked(config, asked.member(record, "question", str, where)),
            image(f"COCO_{split}_{asked.member(record, 'image_id', int, where):012}.jpg"),
            answers,
            answered.member(annotation, "answer_type", str, place),
        )


def read_textvqa(config: BenchmarkConfig, image: FIND_IMAGE) -> Iterator[BenchmarkQuestion]:
    """TextVQA (Singh et al. 2019), version 0.5.1."""
    file = BenchmarkFile(config.uri, "TextVQA 0.5.1", TEXTVQA)
    for where, record in _data(file, "textvqa", version="0.5"):
        answers = file.texts(record, "answers", where)
        if len(answers) != PEOPLE:
            raise file.wrong(f"{where} has {len(answers)} answers, not {PEOPLE}")
        yield BenchmarkQuestion(
            str(file.member(record, "question_id", int, where)),
            _asked(config, file.member(record, "question", str, where)),
            image(f"{file.member(record, 'image_id', str, where)}.jpg"),
            answers,
        )


def read_docvqa(config: BenchmarkConfig, image: FIND_IMAGE) -> Iterator[BenchmarkQuestion]:
    """DocVQA's single-document task (Mathew et al. 2021)."""
    file = BenchmarkFile(config.uri, "DocVQA's single-document task", DOCVQA)
    for where, record in _data(file, "", version=""):
        yield BenchmarkQuestion(
            str(file.member(record, "questionId", int, where)),
            _asked(config, file.member(record, "question", str, where)),
            image(file.member(record, "image", str, where)),
            file.texts(record, "answers", where),
        )


def _data(file: BenchmarkFile, name: str, *, version: str) -> Iterator[tuple[str, object]]:
    """The list `data` of a file that says its name and version."""
    content = file.json()
    records = file.member(content, "data", list, "the file")
    if name:
        file.require(content, "dataset_name", name)
        file.require(content, "dataset_version", version)
    return _numbered(records, "question")


def read_pope(config: BenchmarkConfig, image: FIND_IMAGE) -> Iterator[BenchmarkQuestion]:
    """POPE (Li et al. 2023): JSON lines of questions about whether a thing is in the image."""
    file = BenchmarkFile(config.uri, "POPE's JSON lines", POPE)
    for where, line in _numbered([line for line in file.text().splitlines() if line.strip()], "line"):
        try:
            record = parse_json(line)
        except BadJsonError as error:
            raise file.wrong(f"{where} is not JSON: {error}") from error
        label = file.member(record, "label", str, where)
        if label not in ("yes", "no"):
            raise file.wrong(f"'label' of {where} is {label!r}, not 'yes' or 'no'")
        yield BenchmarkQuestion(
            str(file.member(record, "question_id", int, where)),
            _asked(config, file.member(record, "text", str, where)),
            image(file.member(record, "image", str, where)),
            (label,),
        )


def read_chartqa(config: BenchmarkConfig, image: FIND_IMAGE) -> Iterator[BenchmarkQuestion]:
    """ChartQA (Masry et al. 2022): one JSON list."""
    file = BenchmarkFile(config.uri, "ChartQA's list of questions", CHARTQA)
    content = file.json()
    if not isinstance(content, list):
        raise file.wrong("it is not a list")
    for number, (where, record) in enumerate(_numbered(content, "question")):
        yield BenchmarkQuestion(
            str(number),
            _asked(config, file.member(record, "query", str, where)),
            image(file.member(record, "imgname", str, where)),
            (file.member(record, "label", str, where),),
        )


def read_mmbench(config: BenchmarkConfig, image: FIND_IMAGE) -> Iterator[BenchmarkQuestion]:
    """MMBench (Liu et al. 2023): tab-separated values with images in base64. A rotated copy names its original's."""
    file = BenchmarkFile(config.uri, "MMBench's table", MMBENCH)
    rows = csv_rows(io.StringIO(file.text(), newline=""), "\t")
    missing = [
        name for name in ("index", "question", "A", "B", "answer", "image") if name not in (rows.fieldnames or ())
    ]
    if missing:
        known = ", ".join(map(repr, (rows.fieldnames or ())[:12]))
        raise file.wrong(f"it has no column {missing[0]!r}; its columns are {known}")
    letters = [letter for letter in string.ascii_uppercase if letter in (rows.fieldnames or ())]
    images: dict[str, bytes] = {}
    first: dict[bytes, str] = {}  # the row with an image; others may write it out again, too
    questions = list(_numbered(list(rows), "row"))
    for where, row in questions:
        if not (row["index"] or "").isdigit():
            raise file.wrong(f"'index' of {where} is {row['index']!r}, not a whole number")
        cell = row["image"] or ""
        images[row["index"]] = _decoded(file, cell, where) if len(cell) > LONGEST_INDEX else b""
    for where, row in questions:
        name = row["index"] if images[row["index"]] else str(row["image"])
        if not images.get(name):
            raise file.wrong(f"'image' of {where} is neither an image in base64 nor the index of a row with one")
        name = first.setdefault(images[name], name)
        choices = tuple((letter, row[letter]) for letter in letters if row[letter] not in (None, "", "nan"))
        if row["answer"] not in dict(choices):
            raise file.wrong(f"'answer' of {where} is {row['answer']!r}, not the letter of a choice")
        hint = row.get("hint") or ""
        options = "\n".join(f"{letter}. {text}" for letter, text in choices)
        question = "\n".join(part for part in (hint if hint != "nan" else "", row["question"], options) if part)
        yield BenchmarkQuestion(
            row["index"],
            _asked(config, question) if config.prompt else f"{question}\n{CHOICE_PROMPT}",
            ImageRef(f"row {name}", partial(images.__getitem__, name)),
            (row["answer"],),
            row.get("category") or "all",
            choices,
            group=str(int(row["index"]) % CIRCULAR),
        )


def _decoded(file: BenchmarkFile, text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise file.wrong(f"'image' of {where} is not base64: {error}") from error


def read_coco_captions(config: BenchmarkConfig, image: FIND_IMAGE) -> Iterator[BenchmarkQuestion]:
    """COCO captions (Chen et al. 2015): one question an image, whose answers are all of its captions."""
    file = BenchmarkFile(config.uri, "COCO's captions", COCO)
    content = file.json()
    captions: dict[int, list[str]] = {}
    for where, record in _numbered(file.member(content, "annotations", list, "the file"), "annotation"):
        caption = file.member(record, "caption", str, where)
        captions.setdefault(file.member(record, "image_id", int, where), []).append(caption)
    images = list(_numbered(file.member(content, "images", list, "the file"), "image"))
    if len(images) < MIN_IMAGES:
        raise file.wrong(f"it has {len(images)} images; CIDEr-D compares captions of {MIN_IMAGES} or more")
    for where, record in images:
        number = file.member(record, "id", int, where)
        if number not in captions:
            raise file.wrong(f"{where} (id {number}) has no caption")
        reference = image(file.member(record, "file_name", str, where))
        yield BenchmarkQuestion(str(number), config.prompt or CAPTION_PROMPT, reference, tuple(captions[number]))


READERS: dict[BenchmarkFormat, Reader] = {
    "vqav2": read_vqav2,
    "textvqa": read_textvqa,
    "docvqa": read_docvqa,
    "pope": read_pope,
    "mmbench": read_mmbench,
    "chartqa": read_chartqa,
    "coco-captions": read_coco_captions,
}
VQAV2_QUESTIONS = """{"info": {"version": "2.0"}, "task_type": "Open-Ended", "data_type": "mscoco",
 "data_subtype": "val2014", "questions": [{"image_id": 7, "question": "What is it?", "question_id": 7000}]}"""
VQAV2_ANNOTATIONS = """{"info": {"version": "2.0"}, "data_type": "mscoco", "data_subtype": "val2014", "annotations": [
 {"question_id": 7000, "image_id": 7, "answer_type": "other", "answers": [{"answer": "cup"}, ... ten of them]}]}"""
TEXTVQA = """{"dataset_name": "textvqa", "dataset_version": "0.5.1", "data": [
 {"question_id": 7, "question": "What is the brand?", "image_id": "0a1b", "answers": ["acme", ... ten of them]}]}"""
DOCVQA = """{"data": [
 {"questionId": 7, "question": "What is the date?", "image": "documents/a.png", "answers": ["May 1"]}]}"""
POPE = """{"question_id": 1, "image": "7.jpg", "text": "Is there a cup in the image?", "label": "yes"}"""
MMBENCH = "index\tquestion\thint\tA\tB\tC\tD\tanswer\tcategory\timage"
CHARTQA = """[{"imgname": "7.png", "query": "What is the value in 2020?", "label": "14"}]"""
COCO = """{"images": [{"id": 7, "file_name": "7.jpg"}],
 "annotations": [{"image_id": 7, "caption": "A cup on a table."}]}"""
