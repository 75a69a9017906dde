"""Parquet and Arrow with the images' bytes in it, as Hugging Face's data sets are stored and saved to disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.sources.data_source import Columns
from vlmpipe.trainer.data.accounting.keys import VECTOR, Record
from vlmpipe.trainer.data.conversations.layouts import media_values
from vlmpipe.trainer.data.conversations.message_parts import kind_of
from vlmpipe.trainer.data.conversations.questions import HINT, LISTS
from vlmpipe.trainer.data.conversations.records import SHAPES, identity_of
from vlmpipe.trainer.data.rejects import Reject, RejectCode, RejectedError
from vlmpipe.trainer.data.sample import ImageRef, Sample, stable_digest
from vlmpipe.trainer.data.sources.base import FileSource, Item, Raw
from vlmpipe.trainer.data.sources.columns import names_files
from vlmpipe.trainer.data.sources.file_patterns import Files
from vlmpipe.trainer.data.sources.image_files import ImageFiles, require_size
from vlmpipe.trainer.data.sources.parquet_pages import PageHeaderError, TooLargeRowError, column_chunks, row_bytes
from vlmpipe.trainer.errors import DataError, os_errors
from vlmpipe.trainer.storage.local import LocalStorage

BATCH_ROWS, BATCH_BYTES = 32, 64 << 20  # in memory at once, with their images; one row at least
IMAGE_COLUMNS = ("images", "image")
IDENTIFYING = (
    *SHAPES,
    *LISTS,
    HINT,
    "answer",
    "prompt",
    "query",
    "history",
    "objects",
    "id",
    "slice",
    "split",
)  # columns, of rows without an id
ARROW = ".arrow"
ARROW_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # of a whole stream; without it one may have been cut at a batch
DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError, PageHeaderError, TooLargeRowError)


class RowSource(FileSource[dict[str, object], Record]):
    """Samples of rows. An image is a struct {bytes, path}, plain bytes, or the address of a file."""

    def record_id(self, record: dict[str, object]) -> str:
        return str(record.get("id") or "")

    def named(self, record: dict[str, object]) -> Record:
        return Record.of(record, self.config.columns)

    def sample(self, where: str, record: Record) -> Sample:
        return row_sample(self, where, record)


def row_sample(source: FileSource[Raw, Item], where: str, record: Record) -> Sample:
    """The sample of a record with images as bytes, as {bytes, path} or as addresses. Raises RejectedError."""
    images = tuple(_image(value, source.image_files) for value in media_values(record, "image"))
    texts = {name: value for name, value in record.items() if name in (*IDENTIFYING, source.config.split_by)}
    digest = stable_digest(texts, *(image.name for image in images))[:16]
    return source.build(record, images, where, identity_of(record) or digest)


class ParquetSource(RowSource):
    """Rows of one or many files, in the order of their names."""

    format = "parquet"

    def __init__(self, files: Files, config: DataConfig, left_out: Sequence[str] = ()) -> None:
        """`left_out`: names of further Arrow files, which are not data."""
        self.left_out = left_out
        self.names_images = bool(config.image_folder)
        super().__init__(files, config)

    def fingerprint(self) -> str:
        # Of a bucket's files only the first is fetched for that: files of one set have the same form.
        asked = self.files.names if isinstance(self.files.storage, LocalStorage) else self.files.names[:1]
        self.names_images = self.names_images or any(map(self._names_images, asked))
        return super().fingerprint()

    def _names_images(self, name: str) -> bool:
        """Return whether a file's images are names of files, in some row."""
        columns = (*IMAGE_COLUMNS, *self.config.columns.image)
        uri = self.files.storage.uri(name)
        with self.files.opened(name) as path:
            try:
                return names_files(path, columns, is_arrow=uri.endswith(ARROW))
            except DAMAGE as error:
                raise _damaged(uri, 0, " ".join(str(error).split())[:200]) from error

    def read(self, name: str) -> Iterator[Sample | Reject]:
        with self.files.opened(name) as path:
            for number, row in enumerate(_rows(path, self.files.storage.uri(name), self.config.columns), 1):
                yield self.checked(f"{name} row {number}", row)


def require_conversation(names: Sequence[str], columns: Columns, of: str) -> None:
    """Raise DataError for columns of which none can be a conversation."""
    if set(names) & {*SHAPES, columns.question, columns.answer, columns.messages}:
        return
    raise DataError(
        f"{of} has the columns {', '.join(names[:20])}",
        expected=f"one of the columns {', '.join(SHAPES)}, and images in a column image or images",
        fix="name the columns in the run file, such as data.columns: {image: picture, answer: label}",
    )


def _rows(path: Path, uri: str, mapped: Columns) -> Iterator[dict[str, object]]:
    rows = 0
    try:
        with os_errors(f"reading {uri}"):
            size_bytes = path.stat().st_size
        with _opened(path, is_arrow=uri.endswith(ARROW)) as file:
            columns = [name for name, kind in file.kinds.items() if name not in mapped.ignored and not _is_vector(kind)]
            vectors = {
                name: VECTOR for name in file.kinds if name not in (*columns, *mapped.ignored)
            }  # listed, not read
            require_conversation(list(file.kinds), mapped, uri)
            for batch in file.batches(columns):
                yield from (row | vectors for row in batch.to_pylist())
                rows += len(batch)
            missing = file.missing(rows)
    except DAMAGE as error:
        raise _damaged(uri, rows, f"{' '.join(str(error).split())[:200]} (the file has {size_bytes} bytes)") from error
    if missing:
        raise _damaged(uri, rows, missing)


def _kinds(schema: pa.Schema) -> dict[str, pa.DataType]:
    return dict(zip(schema.names, schema.types, strict=True))


def _is_vector(kind: pa.DataType) -> bool:
    """A list of numbers, such as an embedding or token numbers, which may be large and is never read."""
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
        if pa.types.is_floating(kind) or pa.types.is_integer(kind):
            return True
    return False


@dataclass(frozen=True)
class _Table:
    """An open file: columns with their types, batches of at most BATCH_ROWS, and the message for an early end."""

    kinds: dict[str, pa.DataType]
    batches: Callable[[list[str]], Iterator[pa.RecordBatch]]
    missing: Callable[[int], str]


@contextmanager
def _opened(path: Path, *, is_arrow: bool) -> Iterator[_Table]:
    if is_arrow:
        with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as stream:
            is_whole = path.stat().st_size >= len(ARROW_END) and _end_of(path) == ARROW_END

            def parts(columns: list[str]) -> Iterator[pa.RecordBatch]:
                for batch in stream:
                    batch.validate(full=True)  # offsets in a damaged file may point anywhere into memory
                    chosen = batch.select(columns)
                    rows = _rows_at_once(chosen.nbytes // max(1, len(chosen)))
                    yield from (chosen.slice(start, rows) for start in range(0, len(chosen), rows))

            yield _Table(_kinds(stream.schema), parts, lambda _: "" if is_whole else "its end is missing")
        return
    # With buffers, all its columns would be in memory.
    with pq.ParquetFile(path, pre_buffer=False, page_checksum_verification=True) as file:
        promised = file.metadata.num_rows

        def batches(columns: list[str]) -> Iterator[pa.RecordBatch]:
            chunks = column_chunks(path)
            if len(chunks) != file.num_row_groups:
                raise PageHeaderError("its footer describes other row groups than it has")
            for number in range(file.num_row_groups):
                num_rows = int(file.metadata.row_group(number).num_rows)
                rows = _rows_at_once(row_bytes(path, chunks[number], num_rows, columns))
                yield from file.iter_batches(rows, row_groups=[number], columns=columns, use_threads=False)

        yield _Table(
            _kinds(file.schema_arrow),
            batches,
            lambda rows: "" if rows == promised else f"{promised} rows were promised",
        )


def _rows_at_once(row_bytes: int) -> int:
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, row_bytes)))


def _end_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-len(ARROW_END), os.SEEK_END)
        return file.read()


def _damaged(uri: str, rows: int, how: str) -> DataError:
    return DataError(
        f"{uri} cannot be read after row {rows}: {how}",
        expected="a whole file",
        fix="fetch or write the file again, or leave it out of data.source",
    )


def _image(value: object, files: ImageFiles) -> ImageRef:
    path = ""
    if isinstance(value, dict):
        name, value = value.get("path"), value.get("bytes")
        path = name if isinstance(name, str) else ""
    if value is None and path:
        return files.reference(path)
    if isinstance(value, str):
        return files.named(value)
    if not isinstance(value, bytes):
        raise RejectedError(
            RejectCode.RECORD_FORM, f"an image is {kind_of(value)}, not bytes, {{bytes, path}} or an address"
        )
    require_size(len(value), files.max_image_bytes)
    # Equal names must mean equal images, and the paths in different rows may be the same.
    sha256 = hashlib.sha256(value).hexdigest()
    return ImageRef(sha256 + PurePosixPath(path).suffix, lambda: value, size_bytes=lambda: len(value))
