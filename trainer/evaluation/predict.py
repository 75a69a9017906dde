"""Batch prediction: the exported model's answers to questions about images of a folder or a table.

The model is asked by the functions of the evaluation, so that answers and speed are the evaluation's.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.sources.image_files import IMAGE_SUFFIXES
from vlmpipe.trainer.errors import ConfigError, DataError, os_errors
from vlmpipe.trainer.evaluation.answer import AnsweringModel, Asked, answer_questions, ask_about
from vlmpipe.trainer.evaluation.evaluate import load_export
from vlmpipe.trainer.models.image_tokens import image_form_of

COLUMNS = ("image", "question", "prediction", "error")
TABLES = {".jsonl", ".csv", ".parquet"}


@dataclass(frozen=True)
class ToAnswer:
    """A question about the image in a file."""

    image: Path
    question: str


@dataclass(frozen=True)
class Predicted:
    """How many questions were answered, how many could not be asked, and in what time. load_s: of the model."""

    answered: int
    failed: int
    load_s: float
    answer_s: float


class Output(Protocol):
    def write(self, rows: Sequence[dict[str, str]]) -> None: ...
    def close(self) -> None: ...


def predict(job: JobConfig, questions: Sequence[ToAnswer], output: Path, *, batch: int = 0) -> Predicted:
    """Answer all questions into `output` (.jsonl or .parquet), row by row in their order.

    An image that cannot be read gets a row with its error. The file appears when it is whole. Raises ConfigError for
    another kind of output, DataError for a damaged export or where no image could be read.
    """
    started = time.monotonic()
    partial = output.with_name(f"{output.name}.partial")
    writer = _open_output(partial, output.suffix)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = _answering_model(job, device)
    loaded, failed = time.monotonic(), 0
    size = batch or job.evaluate.batch_questions
    for start in range(0, len(questions), size):
        group = questions[start : start + size]
        rows, asked = [], []
        for one in group:
            row = dict.fromkeys(COLUMNS, "") | {"image": str(one.image), "question": one.question}
            try:
                asked.append((row, _asked(job, model.chat, one)))
            except DataError as error:
                row["error"] = error.found
            rows.append(row)
        most = job.evaluate.max_new_tokens
        answers = (
            answer_questions(job, model, [each for _, each in asked], device, max_new_tokens=most) if asked else []
        )
        for (row, _), answer in zip(asked, answers, strict=True):
            row["prediction"] = answer.text
        failed += len(rows) - len(asked)
        with os_errors(f"writing {partial}"):
            writer.write(rows)
    writer.close()
    if failed == len(questions):
        partial.unlink()
        raise DataError(
            f"none of {failed} images can be asked about; the last one: {rows[-1]['error']}",
            expected="JPEG or PNG files within the limits of the run's section data",
        )
    partial.replace(output)
    return Predicted(len(questions) - failed, failed, loaded - started, time.monotonic() - loaded)


def read_questions(source: Path, question: str) -> list[ToAnswer]:
    """The images of a folder, each with `question`; or the rows of a table with the columns image and question.

    A table's images lie relative to it; `question` stands in for its column. Raises ConfigError or DataError.
    """
    if source.is_dir():
        images = sorted(path for path in source.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
        if not question:
            raise ConfigError(f"{source} is a folder of images", expected="what to ask about them: --question TEXT")
        found = [ToAnswer(path, question) for path in images]
    else:
        found = [_row(source, number, row, question) for number, row in enumerate(_table(source), start=1)]
    if not found:
        raise DataError(f"{source} holds nothing to ask about", expected="images, or a table with rows")
    return found


def _row(source: Path, number: int, row: Any, question: str) -> ToAnswer:
    image, text = (row.get("image"), row.get("question") or question) if isinstance(row, dict) else (None, "")
    if not isinstance(image, str) or not image or not isinstance(text, str) or not text:
        raise DataError(
            f"row {number} of {source} has no {'question' if image else 'image'}",
            expected="the columns image, a file's path, and question; or --question TEXT for all",
        )
    return ToAnswer(source.parent / image, text)


def _table(source: Path) -> Iterator[Any]:
    with os_errors(f"reading {source}"):
        data = source.read_bytes()
    try:
        if source.suffix == ".jsonl":
            return iter([json.loads(line) for line in data.splitlines() if line.strip()])
        if source.suffix == ".csv":
            return iter(list(csv.DictReader(io.StringIO(data.decode("utf-8-sig")))))
        if source.suffix == ".parquet":
            import pyarrow.parquet as pq

            return iter(pq.read_table(io.BytesIO(data)).to_pylist())
    except (ValueError, csv.Error) as error:  # pyarrow's errors are ValueErrors
        raise DataError(f"{source} is not a {source.suffix[1:]} table: {error}") from error
    raise ConfigError(f"{source} is no table that can be read", expected=f"a folder, or {', '.join(sorted(TABLES))}")


def _answering_model(job: JobConfig, device: torch.device) -> AnsweringModel:
    family, model = load_export(job, device)
    return AnsweringModel(
        family, model, Chat.load(open_prepared(job.pointers().prepared_uri), image_form_of(job.model)), None
    )


def _asked(job: JobConfig, chat: Chat, one: ToAnswer) -> Asked:
    try:
        data = one.image.read_bytes()
    except OSError as error:
        raise DataError(f"{one.image}: {error.strerror}") from error
    return ask_about(job, chat, one.question, data, str(one.image))


def _open_output(path: Path, suffix: str) -> Output:
    if suffix not in (".jsonl", ".parquet"):
        raise ConfigError(
            f"found --output with {suffix or 'no ending'}", expected="a file that ends in .jsonl or .parquet"
        )
    with os_errors(f"writing {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        return _JsonLines(path) if suffix == ".jsonl" else _Parquet(path)


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, rows: Sequence[dict[str, str]]) -> None:
        self._file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Parquet:
    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._table, self._schema = pa.Table, pa.schema([(name, pa.string()) for name in COLUMNS])
        self._writer = pq.ParquetWriter(path, self._schema)

    def write(self, rows: Sequence[dict[str, str]]) -> None:
        self._writer.write_table(self._table.from_pylist(list(rows), schema=self._schema))

    def close(self) -> None:
        self._writer.close()
