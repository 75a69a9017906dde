"""The file of predicted answers. They are JSON lines next to it until all are there: a stopped prediction continues."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO

from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, os_errors
from vlmpipe.trainer.printable import escaped_in_json
from vlmpipe.trainer.storage.file_systems import NO_LOCKS
from vlmpipe.trainer.storage.regular_files import open_lock

TABLES = {".jsonl", ".csv", ".parquet"}
ROWS_AT_ONCE = 10_000  # that a Parquet file takes
STAMP = "image_stamp"  # in the partial file, by which a changed image is known


@dataclass(frozen=True)
class ToAnswer:
    """A question about the image in a file, or of a source, in which `image` is its name.

    stamp: what changes with the source. problem: why it cannot be asked. system: text of its conversation before it.
    """

    image: Path
    question: str
    read: Callable[[], bytes] | None = None
    problem: str = ""
    stamp: str = ""
    system: str = ""


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

    `partial` holds the answers that are there, after a line that names the model. It is locked until this is closed,
    however the process ends. Answers of another model, to other questions or about images that have changed since are
    not taken over; `not_taken_over` says how many and why.
    """

    def __init__(self, output: Path, model: str, questions: Sequence[ToAnswer]) -> None:
        """Raises ConfigError for another kind of output, UserError where it cannot be written or is being written."""
        if output.suffix not in TABLES:
            raise ConfigError(
                f"found --output with {output.suffix or 'no ending'}",
                expected=f"a file that ends in {', '.join(sorted(TABLES))}",
            )
        self.output, self.partial = output, output.with_name(f"{output.name}.partial")
        self.not_taken_over = ""
        # Before an image is read, so that any later change is one.
        self._stamps = [question.stamp or _stamp(question.image) for question in questions]
        with os_errors(f"writing {self.partial}"):
            output.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._locked()
            self.earlier = self._take_over(_line({"model": model}), questions)
        self._written = len(self.earlier)

    def write(self, rows: Sequence[Answer]) -> None:
        stamps = self._stamps[self._written :]
        with os_errors(f"writing {self.partial}"):
            for row, stamp in zip(rows, stamps, strict=False):
                self._file.write(_line({**asdict(row), STAMP: stamp}))
            self._file.flush()
        self._written += len(rows)

    def close(self, *, keep: bool) -> None:
        """Leave the answers for the next start, or nothing."""
        if not keep:
            self.partial.unlink()
        self._file.close()

    def finish(self) -> None:
        """Make `output` of the answers. It appears when it is whole."""
        whole = self.output.with_name(f"{self.output.name}.tmp")
        with os_errors(f"writing {whole}"):
            try:
                self._convert(whole)
                whole.replace(self.output)
            finally:
                whole.unlink(missing_ok=True)
            self.close(keep=False)

    def _locked(self) -> BinaryIO:
        """The partial file, made if need be, which no other process has until it is closed."""
        while True:
            file = os.fdopen(open_lock(self.partial, 0o666), "r+b")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise UserError(
                    f"another process is writing answers into {self.output}",
                    expected="one prediction at a time into a file",
                    fix="wait until it ends, or give another --output",
                    code=ExitCode.UNAVAILABLE,
                ) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                return file
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), self.partial.stat()):
                    return file
            file.close()  # a process that has just finished had removed it when the lock was free

    def _take_over(self, header: bytes, questions: Sequence[ToAnswer]) -> list[Answer]:
        """The answers of an earlier start that still hold; the file is cut after them."""
        rows: list[Answer] = []
        held, why = 0, "they are to other questions"
        lines = iter(self._file.readline, b"")
        if next(lines, b"") == header:
            held = len(header)
            for question, stamp, line in zip(questions, self._stamps, lines, strict=False):
                answer = _content(line)
                changed = answer.pop(STAMP, None) != stamp
                if (answer.get("image"), answer.get("question")) != (str(question.image), question.question):
                    break
                if changed:
                    why = f"{question.image} has changed"
                    break
                rows.append(Answer(**answer))
                held += len(line)
        self._file.seek(held)
        left = sum(line.endswith(b"\n") for line in self._file)  # the last one may have been cut by a kill
        if not held:
            left, why = left - 1, "another model gave them, or one with other settings"
            self._file.seek(0)
            self._file.write(header)
            held = len(header)
        if left > 0:
            self.not_taken_over = f"{left:,} answers of an earlier start are not taken over: {why}"
        self._file.seek(held)
        self._file.truncate()
        self._file.flush()
        return rows

    def _convert(self, whole: Path) -> None:
        self._file.seek(0)
        self._file.readline()
        rows = map(_content, self._file)
        if self.output.suffix == ".parquet":
            _write_parquet(whole, map(_in_utf_8, rows))
        elif self.output.suffix == ".csv":
            _write_csv(whole, map(_in_utf_8, rows))
        else:
            with whole.open("wb") as file:
                file.writelines(_line({name: row[name] for name in COLUMNS}) for row in rows)


def _line(content: Mapping[str, str]) -> bytes:
    """A line of JSON. Bytes of a file's name that are not UTF-8, which Python has as lone surrogates, are escapes."""
    return (escaped_in_json(json.dumps(content, ensure_ascii=False)) + "\n").encode()


def _content(line: bytes) -> dict[str, str]:
    """The fields of a line; none where it was cut."""
    try:
        content = json.loads(line) if line.endswith(b"\n") else {}
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _in_utf_8(row: dict[str, str]) -> dict[str, str]:
    """The row with a question mark for each byte of a file's name that is not UTF-8: these tables have no escapes."""
    return {name: value.encode("utf-8", "replace").decode() for name, value in row.items()}


def _stamp(image: Path) -> str:
    """Identity of the file's state: its size, and when it or its name changed last. Empty where there is none."""
    try:
        stat = image.stat()
    except OSError:
        return ""
    return f"{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}"


def _write_csv(path: Path, rows: Iterator[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def _write_parquet(path: Path, rows: Iterator[dict[str, str]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.string()) for name in COLUMNS])
    with contextlib.closing(pq.ParquetWriter(path, schema)) as writer:
        while some := list(itertools.islice(rows, ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(some, schema=schema))
