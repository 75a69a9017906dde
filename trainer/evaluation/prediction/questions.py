"""Questions of a prediction about an image, a folder's images, a table's rows, or a source that training reads."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.conversations.questions import LISTS
from vlmpipe.trainer.data.rejects import Reject
from vlmpipe.trainer.data.sample import Sample
from vlmpipe.trainer.data.sources import BUILTIN_PREFIX, open_source
from vlmpipe.trainer.data.sources.image_files import IMAGE_SUFFIXES
from vlmpipe.trainer.data.text_files.csv_rows import csv_rows
from vlmpipe.trainer.errors import ConfigError, DataError, os_errors
from vlmpipe.trainer.evaluation.prediction.answer_file import TABLES, ToAnswer

IMAGE_NAMES = ("image", "file_name")  # names of the column of images, as data preparation has them
MAX_HELD_BYTES = 2 << 30  # of images that lie in tables, which are all in memory


def read_questions(source: str | Path, question: str, data: DataConfig | None = None) -> list[ToAnswer]:
    """An image or the images of a folder, each with `question`; the rows of a table of images and questions; or each
    turn of the samples of a source that training reads, by itself after the system text.

    A folder with a table named metadata, as data preparation reads it, is that table. A table's images lie relative to
    it; `question` stands in for its column. Raises ConfigError or DataError.

    Args:
        data: the section of the run, by whose columns and limits a source is read; None takes no such source.
    """
    if data and ("://" in str(source) or str(source).startswith(BUILTIN_PREFIX)):
        return _of_source(str(source), question, data)
    place = Path(source)
    if place.is_dir():
        table = next((path for kind in sorted(TABLES) if (path := place / f"metadata{kind}").is_file()), None)
        images = sorted(path for path in place.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    else:
        table = place if place.suffix.lower() in TABLES else None
        images = [place] if place.suffix.lower() in IMAGE_SUFFIXES else []
    rows = list(_table(table)) if table else []
    if data and (not _is_question(rows[0]) if rows else not (table or images)):
        return _of_source(str(source), question, data)
    if table:
        questions = [_row(table, number, row, question) for number, row in enumerate(rows, start=1)]
    elif images and not question:
        what = "a folder of images" if place.is_dir() else "an image"
        raise ConfigError(f"{place} is {what}", expected="what to ask: --question TEXT")
    elif not place.is_dir() and not images:
        expected = f"an image, a folder, or {', '.join(sorted(TABLES))}"
        raise ConfigError(f"{place} is no image and no table that can be read", expected=expected)
    else:
        questions = [ToAnswer(path, question) for path in images]
    if not questions:
        raise DataError(f"{place} holds nothing to ask about", expected="images, or a table with rows")
    return questions


def _is_question(row: object) -> bool:
    """Return whether a record names an image file. Samples of a source have images in other forms, texts in messages,
    or options next to their question. Other lists, such as several answers, are nothing that is asked."""
    if not isinstance(row, dict) or not any(isinstance(row.get(name), str) for name in IMAGE_NAMES):
        return False
    lists = {name for name, value in row.items() if isinstance(value, list)}
    return lists.isdisjoint(LISTS) if isinstance(row.get("question"), str) else not lists


def _of_source(source: str, question: str, data: DataConfig) -> list[ToAnswer]:
    """The questions of a source. What cannot be asked is one with its reason, so that its row says it."""
    changed: dict[str, object] = {"source": source, "sources": (), "phases": (), "max_samples": 0}
    if source != data.source:
        changed["image_folder"] = ""  # they lie next to the records, or in them
    opened = open_source(data.model_copy(update=changed))
    stamp, held_bytes, questions = opened.fingerprint(), 0, list[ToAnswer]()
    for sample in opened:
        if isinstance(sample, Reject):
            questions.append(ToAnswer(Path(sample.where), question, problem=sample.message, stamp=stamp))
            continue
        held_bytes += sum(image.size_bytes() for image in sample.images if image.size_bytes and not image.is_file)
        if held_bytes > MAX_HELD_BYTES:
            raise ConfigError(
                f"{source} holds more than {MAX_HELD_BYTES >> 30} GiB of images in its tables",
                expected="as many as fit into memory, or images in files of their own",
                fix="ask about parts of it, or write its images as files: vlmpipe data export",
            )
        questions += _of_sample(sample, question, stamp)
    if not questions:
        raise DataError(f"{source} holds nothing to ask about", expected="samples with an image and a question")
    return questions


def _of_sample(sample: Sample, question: str, stamp: str) -> list[ToAnswer]:
    texts = [turn.question.replace(IMAGE_TOKEN, "").strip() or question for turn in sample.turns]
    if len(sample.images) != 1:
        problem = f"{sample.where} has {len(sample.images)} images; expected one"
        return [ToAnswer(Path(sample.where), text, problem=problem, stamp=stamp) for text in texts]
    (image,) = sample.images
    system = sample.turns[0].system
    return [ToAnswer(Path(image.name), text, image.read, stamp=stamp, system=system) for text in texts]


def _row(source: Path, number: int, row: object, question: str) -> ToAnswer:
    values = row if isinstance(row, dict) else {}
    image, text = next((values[name] for name in IMAGE_NAMES if values.get(name)), None), values.get("question")
    text = text or question
    if not isinstance(image, str) or not isinstance(text, str) or not text:
        raise DataError(
            f"row {number} of {source} has no {'question' if image else 'image'}",
            expected=f"the columns {' or '.join(IMAGE_NAMES)}, a file's path, and question; or --question TEXT for all",
        )
    return ToAnswer(source.parent / image, text)


def _table(source: Path) -> Iterator[object]:
    with os_errors(f"reading {source}"):
        data = source.read_bytes()
    kind = source.suffix.lower()
    try:
        if kind == ".jsonl":
            return iter([json.loads(line) for line in data.splitlines() if line.strip()])
        if kind == ".csv":
            return iter(list(csv_rows(io.StringIO(data.decode("utf-8-sig")))))
        import pyarrow.parquet as pq

        return iter(pq.read_table(io.BytesIO(data)).to_pylist())
    except (ValueError, csv.Error) as error:  # pyarrow's errors are ValueErrors
        raise DataError(f"{source} is not a {kind[1:]} table: {error}") from error
