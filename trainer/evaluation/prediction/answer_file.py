"""The file of predicted answers. They are JSON lines next to it until all are there: a stopped prediction continues."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TextIO

from vlmpipe.trainer.errors import ConfigError, os_errors

TABLES = {".jsonl", ".csv", ".parquet"}
ROWS_AT_ONCE = 10_000  # that a Parquet file takes


@dataclass(frozen=True)
class ToAnswer:
    """A question about the image in a file."""

    image: Path
    question: str


@dataclass
class Answer:
    """A row of the output: a model's answer, or why it could not be asked."""

    image: str
    question: str
    prediction: str = ""
    error: str = ""


COLUMNS = tuple(field.name for field in fields(Answer))


class AnswerFile:
    """Answers to `questions` in their order, on their way into `output` (.jsonl, .csv or .parquet).

    `partial` holds the answers that are there, after a line that names the model: those of another model, or to other
    questions, are not taken over.
    """

    def __init__(self, output: Path, model: str, questions: Sequence[ToAnswer]) -> None:
        """Raises ConfigError for another kind of output, UserError where it cannot be written."""
        if output.suffix not in TABLES:
            raise ConfigError(
                f"found --output with {output.suffix or 'no ending'}",
                expected=f"a file that ends in {', '.join(sorted(TABLES))}",
            )
        self.output, self.partial = output, output.with_name(f"{output.name}.partial")
        with os_errors(f"writing {self.partial}"):
            output.parent.mkdir(parents=True, exist_ok=True)
            self.earlier = self._rows_of(model, questions)
            taken_over = output.with_name(f"{output.name}.partial.tmp")  # a kill leaves the file with all answers
            self._file = taken_over.open("w", encoding="utf-8")
            self._file.write(json.dumps({"model": model}) + "\n")
            self.write(self.earlier)
            taken_over.replace(self.partial)

    def write(self, rows: Sequence[Answer]) -> None:
        with os_errors(f"writing {self.partial}"):
            self._file.writelines(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)
            self._file.flush()

    def close(self, *, keep: bool) -> None:
        """Leave the answers for the next start, or nothing."""
        self._file.close()
        if not keep:
            self.partial.unlink()

    def finish(self) -> None:
        """Make `output` of the answers. It appears when it is whole."""
        self._file.close()
        whole = self.output.with_name(f"{self.output.name}.tmp")
        with os_errors(f"writing {whole}"):
            try:
                self._convert(whole)
                whole.replace(self.output)
            finally:
                whole.unlink(missing_ok=True)
            self.partial.unlink()

    def _rows_of(self, model: str, questions: Sequence[ToAnswer]) -> list[Answer]:
        """The answers of an earlier start, as far as they answer these questions about images that have not changed."""
        rows: list[Answer] = []
        try:
            with self.partial.open(encoding="utf-8") as file:
                if json.loads(file.readline()) != {"model": model}:
                    return []
                answered_s = os.fstat(file.fileno()).st_mtime
                for question, line in zip(questions, file, strict=False):
                    row = Answer(**json.loads(line))
                    if (row.image, row.question) != (str(question.image), question.question):
                        break
                    if _changed_s(question.image) > answered_s:
                        break
                    rows.append(row)
        except (FileNotFoundError, ValueError, TypeError):  # none, or a line that was being written
            pass
        return rows

    def _convert(self, whole: Path) -> None:
        with self.partial.open(encoding="utf-8") as partial:
            partial.readline()
            if self.output.suffix == ".parquet":
                _write_parquet(whole, map(json.loads, partial))
                return
            with whole.open("w", encoding="utf-8", newline="") as file:
                _write_csv(file, map(json.loads, partial)) if self.output.suffix == ".csv" else file.writelines(partial)


def _changed_s(image: Path) -> float:
    """When the file or its name changed last, in seconds since the epoch; 0 where there is none."""
    try:
        found = image.stat()
    except OSError:
        return 0.0
    return max(found.st_mtime, found.st_ctime)


def _write_csv(file: TextIO, rows: Iterator[dict[str, str]]) -> None:
    writer = csv.DictWriter(file, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)


def _write_parquet(path: Path, rows: Iterator[dict[str, str]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.string()) for name in COLUMNS])
    with contextlib.closing(pq.ParquetWriter(path, schema)) as writer:
        while some := list(itertools.islice(rows, ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(some, schema=schema))
