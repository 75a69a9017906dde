"""Prediction: the exported model's answers to questions about an image, or about those of a folder or a table.

The model is asked by the functions of the evaluation, so that answers and speed are the evaluation's.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.rejects import RejectedError
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.errors import DataError, ExitCode, UserError
from vlmpipe.trainer.evaluation.answer import AnsweringModel, Asked, answer_questions, ask_about
from vlmpipe.trainer.evaluation.batch_budget import BatchBudget
from vlmpipe.trainer.evaluation.prediction.answer_file import Answer, AnswerFile, ToAnswer
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.serving.exported_model import load_export
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import NAME as EXPORTED


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
        for question in questions:
            row = Answer(str(question.image), question.question)
            try:
                asked.append((row, _asked(self.job, self.model.chat, question)))
            except DataError as error:
                row.error = error.found
            rows.append(row)
        if asked:
            most = self.job.evaluate.max_new_tokens
            to_answer = [question for _, question in asked]
            answers = answer_questions(self.job, self.model, to_answer, self.device, max_new_tokens=most)
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


def _answering_model(job: JobConfig, device: torch.device) -> AnsweringModel:
    family, model = load_export(job, device)
    chat = Chat.load(open_prepared(job.pointers().prepared_uri), image_form_of(job.model), is_proved=True)
    return AnsweringModel(family, model, chat, None, BatchBudget(job.evaluate.batch_tokens))


def _name_of(job: JobConfig) -> str:
    """Digest of the run's exported model and its settings."""
    run = open_storage(job.run.run_uri)
    exported = run.read(EXPORTED) if run.stat(EXPORTED) else b""
    return hashlib.sha256(job.model_dump_json().encode() + exported).hexdigest()


def _asked(job: JobConfig, chat: Chat, to_answer: ToAnswer) -> Asked:
    if to_answer.problem:
        raise DataError(to_answer.problem)
    try:
        data = to_answer.read() if to_answer.read else to_answer.image.read_bytes()
    except RejectedError as error:
        raise DataError(f"{to_answer.image}: {error}") from error
    except OSError as error:
        raise DataError(f"{to_answer.image}: {error.strerror}") from error
    return ask_about(job, chat, to_answer.question, data, str(to_answer.image), system=to_answer.system)
