"""Prediction: the exported model's answers to questions about an image, or about those of a folder or a table.

The model is asked by the functions of the evaluation, so that answers and speed are the evaluation's.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.sources.image_files import IMAGE_SUFFIXES
from vlmpipe.trainer.data.text_files.csv_rows import csv_rows
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError, os_errors
from vlmpipe.trainer.evaluation.answer import AnsweringModel, Asked, answer_questions, ask_about
from vlmpipe.trainer.evaluation.batch_budget import BatchBudget
from vlmpipe.trainer.evaluation.prediction.answer_file import TABLES, Answer, AnswerFile, ToAnswer
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.serving.exported_model import load_export
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import NAME as EXPORTED

IMAGE_NAMES = ("image", "file_name")  # names of the column of images, as data preparation has them


@dataclass(frozen=True)
class Predicted:
    """How many questions were answered, how many could not be asked, and in what time. load_s: of the model.

    continued: of both, those of an earlier start, which was stopped; not_taken_over says of others of it why.
    """

    answered: int
    failed: int
    load_s: float
    answer_s: float
    continued: int = 0
    not_taken_over: str = ""


@dataclass(frozen=True)
class Predictor:
    """A run's exported model, ready to be asked."""

    job: JobConfig
    model: AnsweringModel
    device: torch.device
    load_s: float

    @classmethod
    def load(cls, job: JobConfig) -> Predictor:
        """Raises DataError for a damaged export."""
        started = time.monotonic()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = _answering_model(job, device)
        return cls(job, model, device, time.monotonic() - started)

    def answer(
        self, questions: Sequence[ToAnswer], *, batch: int = 0, may_fail: bool = False
    ) -> Iterator[list[Answer]]:
        """Answers in the order of the questions, `batch` at once (0: evaluate.batch_questions).

        One whose image cannot be read has its error. Raises DataError at the end where none could, unless all may fail.
        """
        failed, size = 0, batch or self.job.evaluate.batch_questions
        rows: list[Answer] = []
        for start in range(0, len(questions), size):
            rows = self._answer_at_once(questions[start : start + size])
            failed += sum(bool(row.error) for row in rows)
            if failed < len(questions) or may_fail:
                yield rows
        if rows and failed == len(questions) and not may_fail:
            raise DataError(
                f"none of {failed} images can be asked about; the last one: {rows[-1].error}",
                expected="JPEG or PNG files within the limits of the run's section data",
            )

    def _answer_at_once(self, questions: Sequence[ToAnswer]) -> list[Answer]:
        rows, asked = [], []
        for one in questions:
            row = Answer(str(one.image), one.question)
            try:
                asked.append((row, _asked(self.job, self.model.chat, one)))
            except DataError as error:
                row.error = error.found
            rows.append(row)
        if asked:
            most = self.job.evaluate.max_new_tokens
            given = [each for _, each in asked]
            answers = answer_questions(self.job, self.model, given, self.device, max_new_tokens=most)
            for (row, _), answer in zip(asked, answers, strict=True):
                row.prediction = answer.text
        return rows


def predict(job: JobConfig, questions: Sequence[ToAnswer], output: Path, *, batch: int = 0) -> Predicted:
    """Answer all questions into `output` (.jsonl, .csv or .parquet), row by row in their order.

    The file appears when it is whole. Stopped by Ctrl-C, the same call continues after the answers that were there.
    Raises ConfigError for another kind of output, UserError where another process writes it, DataError for a damaged
    export or where no image could be read.
    """
    file = AnswerFile(output, _name_of(job), questions)
    answered, load_s, started = len(file.earlier), 0.0, time.monotonic()
    failed = sum(bool(row.error) for row in file.earlier)
    try:
        if rest := questions[answered:]:
            predictor = Predictor.load(job)
            load_s, started = predictor.load_s, time.monotonic()
            for rows in predictor.answer(rest, batch=batch, may_fail=failed < answered):
                file.write(rows)
                answered += len(rows)
                failed += sum(bool(row.error) for row in rows)
    except KeyboardInterrupt:
        file.close(keep=bool(answered))
        raise UserError(
            f"stopped: {answered:,} of {len(questions):,} questions are answered",
            fix=f"the same command continues; {file.partial} has the answers" if answered else "",
            code=ExitCode.INTERRUPTED,
        ) from None
    except DataError:
        file.close(keep=failed < answered)
        raise
    file.finish()
    answer_s, taken = time.monotonic() - started, len(file.earlier)
    return Predicted(len(questions) - failed, failed, load_s, answer_s, taken, file.not_taken_over)


def read_questions(source: Path, question: str) -> list[ToAnswer]:
    """An image or the images of a folder, each with `question`; or the rows of a table of images and questions.

    A folder with a table named metadata, as data preparation reads it, is that table. A table's images lie relative to
    it; `question` stands in for its column. Raises ConfigError or DataError.
    """
    if source.is_dir():
        table = next((path for kind in sorted(TABLES) if (path := source / f"metadata{kind}").is_file()), None)
        images = sorted(path for path in source.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    else:
        table = source if source.suffix.lower() in TABLES else None
        images = [source] if source.suffix.lower() in IMAGE_SUFFIXES else []
    if table:
        found = [_row(table, number, row, question) for number, row in enumerate(_table(table), start=1)]
    elif images and not question:
        what = "a folder of images" if source.is_dir() else "an image"
        raise ConfigError(f"{source} is {what}", expected="what to ask: --question TEXT")
    elif not source.is_dir() and not images:
        expected = f"an image, a folder, or {', '.join(sorted(TABLES))}"
        raise ConfigError(f"{source} is no image and no table that can be read", expected=expected)
    else:
        found = [ToAnswer(path, question) for path in images]
    if not found:
        raise DataError(f"{source} holds nothing to ask about", expected="images, or a table with rows")
    return found


def _row(source: Path, number: int, row: Any, question: str) -> ToAnswer:
    values = row if isinstance(row, dict) else {}
    image, text = next((values[name] for name in IMAGE_NAMES if values.get(name)), None), values.get("question")
    text = text or question
    if not isinstance(image, str) or not isinstance(text, str) or not text:
        raise DataError(
            f"row {number} of {source} has no {'question' if image else 'image'}",
            expected=f"the columns {' or '.join(IMAGE_NAMES)}, a file's path, and question; or --question TEXT for all",
        )
    return ToAnswer(source.parent / image, text)


def _table(source: Path) -> Iterator[Any]:
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


def _answering_model(job: JobConfig, device: torch.device) -> AnsweringModel:
    family, model = load_export(job, device)
    chat = Chat.load(open_prepared(job.pointers().prepared_uri), image_form_of(job.model), is_proved=True)
    return AnsweringModel(family, model, chat, None, BatchBudget(job.evaluate.batch_tokens))


def _name_of(job: JobConfig) -> str:
    """What tells the run's exported model and its settings from others."""
    run = open_storage(job.run.run_uri)
    exported = run.read(EXPORTED) if run.stat(EXPORTED) else b""
    return hashlib.sha256(job.model_dump_json().encode() + exported).hexdigest()


def _asked(job: JobConfig, chat: Chat, one: ToAnswer) -> Asked:
    try:
        data = one.image.read_bytes()
    except OSError as error:
        raise DataError(f"{one.image}: {error.strerror}") from error
    return ask_about(job, chat, one.question, data, str(one.image))
