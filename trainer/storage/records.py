"""JSON records with a CRC32C of their own text, so that damage is found when they are read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from vlmpipe.trainer.errors import DataError, os_errors
from vlmpipe.trainer.storage.base import Storage, crc32c_of, in_bucket
from vlmpipe.trainer.storage.regular_files import NotRegularFileError, read_whole

KEY = "record_crc32c"
RUN_FILE = "run.json"
WITH_ADDRESSES = {RUN_FILE, "prepared.json", "registered.json", "sweep.json"}  # of a run's folder
MISSING = (FileNotFoundError, NotADirectoryError, NotRegularFileError)
_MARK = f', "{KEY}": "'.encode()
_SEAL_BYTES = len(_MARK) + len('01234567"}')


def seal(record: Mapping[str, object], *, indent: int | None = None, allow_nan: bool = True) -> bytes:
    """A record that is not empty as JSON, its last member the CRC32C of the text before that member."""
    # Files with an indent are for people to read, in any script.
    text = json.dumps(record, indent=indent, ensure_ascii=not indent, allow_nan=allow_nan)
    return _sealed(text.removesuffix("}").rstrip().encode())


def unseal(data: bytes, *, required: bool = False) -> dict[str, Any]:
    """The record without its checksum.

    A text without a checksum, such as one written by hand, is accepted unless the checksum is `required`. Raises
    ValueError that says what is wrong with the text.
    """
    record = json.loads(data)
    if not isinstance(record, dict):
        raise ValueError(f"it holds {type(record).__name__}, not an object")
    if is_whole(data):
        del record[KEY]
        return record
    last = next(reversed(record), "")
    # One damaged character in the key must not make a sealed record look like one without a checksum.
    is_sealed = len(last) == len(KEY) and sum(map(str.__eq__, last, KEY)) >= len(KEY) - 1
    if KEY in record or is_sealed:
        raise ValueError("its checksum (CRC32C) is not that of its content")
    if required:
        raise ValueError("it has no checksum (CRC32C)")
    return record


def is_whole(data: bytes) -> bool:
    """Return whether this is a sealed record as written, by its checksum alone."""
    return data.endswith(b'"}') and data == _sealed(data[:-_SEAL_BYTES])


def _sealed(text: bytes) -> bytes:
    return text + _MARK + f'{crc32c_of(text):08x}"}}'.encode()


def seal_lines(records: Iterable[Mapping[str, object]]) -> bytes:
    """JSON lines, each with its own checksum."""
    return b"".join(seal(record) + b"\n" for record in records)


def unseal_lines(data: bytes, *, required: bool = False) -> list[dict[str, object]]:
    """The records of JSON lines. Raises ValueError that names the first damaged line."""
    records = []
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n") if data else (), 1):
        try:
            records.append(unseal(line, required=required))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    return records


def write_record(store: Storage, name: str, record: Mapping[str, object], *, indent: int | None = None) -> None:
    store.write(name, seal(record, indent=indent))


def read_record(store: Storage, name: str) -> dict[str, Any]:
    """Return the record, of a run with addresses as it lies now (`as_it_lies`).

    Raises DataError for a damaged record, UserError where there is none.
    """
    record = read_as_written(store, name)
    if name not in WITH_ADDRESSES or in_bucket(store.root_uri):
        return record
    return as_it_lies(
        record, record if name == RUN_FILE else read_record_file(Path(store.uri(RUN_FILE))), store.root_uri
    )


def read_as_written(store: Storage, name: str) -> dict[str, object]:
    """Return the record with the addresses that it was written with. Raises as `read_record` does."""
    try:
        return unseal(store.read(name))
    except ValueError as error:
        raise damaged_record(store.uri(name), error) from error


def write_run_file(store: Storage, content: Mapping[str, object]) -> None:
    """Write a run's run.json. If the run was moved, its other records get the addresses where they lie now first.

    Which addresses those are follows from the former run.json, which named the root of before.
    """
    if not in_bucket(store.root_uri) and (before := read_record_file(Path(store.uri(RUN_FILE)))):
        for name in sorted(WITH_ADDRESSES - {RUN_FILE}):
            with contextlib.suppress(DataError):  # a damaged one is left to those who read it
                record = read_record_file(Path(store.uri(name)))
                if (now := as_it_lies(record, before, store.root_uri)) != record:
                    write_record(store, name, now, indent=1)
    write_record(store, RUN_FILE, content, indent=1)


def as_it_lies(record: dict[str, object], run_file: Mapping[str, object], folder: str) -> dict[str, object]:
    """A record of the run in `folder`, with addresses under the root in which that folder is now.

    The root may have been moved or copied since the run, or have another name in a container. What is there only under
    the root where the run was made keeps its address.

    Args:
        run_file: the content of the run's run.json, which names that root.
    """
    paths = run_file.get("run")
    if not isinstance(paths, Mapping):
        return record
    root, place = str(paths.get("root_uri", "")), f"/runs/{paths.get('run_id')}"
    if not os.path.isabs(root) or not folder.endswith(place) or os.path.realpath(root + place) == folder:
        return record
    now = folder.removesuffix(place)

    def placed(value: object) -> object:
        if isinstance(value, Mapping):
            return {name: placed(below) for name, below in value.items()}
        if isinstance(value, list):
            return [placed(below) for below in value]
        if not isinstance(value, str) or (value != root and not value.startswith(f"{root}/")):
            return value
        here = now + value.removeprefix(root)
        return here if os.path.exists(here) or not os.path.exists(value) else value

    return cast(dict[str, Any], placed(record))


def read_lines(store: Storage, name: str) -> list[dict[str, Any]]:
    """The records of a file of JSON lines. Raises as `read_record` does."""
    try:
        return unseal_lines(store.read(name))
    except ValueError as error:
        raise damaged_record(store.uri(name), error) from error


def read_record_file(path: Path | str) -> dict[str, Any]:
    """The record in a file, empty where there is none. Raises DataError for a damaged one."""
    return record_in(record_bytes(path), path)


def record_bytes(path: Path | str) -> bytes:
    """The bytes of a record's file, none where there is none."""
    try:
        return read_whole(path)
    except MISSING:
        return b""
    except (OSError, UnicodeEncodeError):
        with os_errors(f"reading {path}"):
            raise


def record_in(data: bytes, path: Path | str) -> dict[str, Any]:
    """The record in the bytes of the file `path`, empty without any. Raises DataError for a damaged one."""
    try:
        return unseal(data) if data else {}
    except ValueError as error:
        raise damaged_record(str(path), error) from error


def damaged_record(uri: str, how: object) -> DataError:
    return DataError(
        f"{uri} is damaged: {how}",
        expected="the text that vlmpipe wrote",
        fix=f"delete the file and run the same command again; if you edited it on purpose, leave out its {KEY}",
    )
