"""Prepared data as a store: the manifest that completes it, and a check of every file that is read."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from vlmpipe.trainer.data.shards.manifest_pages import PAGE_FILES, FilePages
from vlmpipe.trainer.data.shards.verified_files import FOLDER, damaged_file
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import ObjectInfo, Storage, crc32c_of
from vlmpipe.trainer.storage.file_sums import FileSum
from vlmpipe.trainer.storage.records import seal, unseal

FORMAT = 14  # of the files; raise it when the same samples are stored in other files
CONVERTIBLE = 13  # the index was a Parquet file, which every process read whole
DONE = "DONE"  # the manifest, written last; a folder without it is not prepared data


@dataclass(frozen=True)
class Manifest:
    """Every other file of prepared data, and the counts of its preparation."""

    format: int
    fingerprint: str
    counts: dict[str, int]
    files: Mapping[str, FileSum]  # of a large set on pages of their own

    def in_pages(self, storage: Storage) -> Manifest:
        """The manifest with a long list of files stored on pages; itself with a short one."""
        return self if len(self.files) <= PAGE_FILES else replace(self, files=FilePages.write(storage, self.files))

    @property
    def page_names(self) -> frozenset[str]:
        """Names of the files that hold the list."""
        return frozenset(page.name for page in self.files.pages) if isinstance(self.files, FilePages) else frozenset()

    def to_bytes(self) -> bytes:
        content: dict[str, object] = {"format": self.format, "fingerprint": self.fingerprint, "counts": self.counts}
        if isinstance(self.files, FilePages):
            return seal(content | {"pages": self.files.as_json()}, indent=1)
        return seal(content | {"files": {name: asdict(sums) for name, sums in self.files.items()}}, indent=1)

    @classmethod
    def read(cls, storage: Storage, *, file_format: int = FORMAT) -> Manifest:
        """Raises DataError for one that is damaged, OtherFormatError for one of another format, UserError where there
        is none.
        """
        try:
            values = unseal(storage.read(DONE), required=True)
        except ValueError as error:
            raise damaged_file(storage.uri(DONE), str(error)) from error
        except UserError as error:
            if storage.stat(DONE) is not None:
                raise
            raise UserError(
                f"there is no prepared data in {storage.root_uri}: it has no file {DONE}",
                expected="a folder that prepare_data has completed, such as ROOT/prepared/0123456789abcdef...",
                fix="name that folder, or run the run file, which prepares its data",
                code=ExitCode.NOT_FOUND,
            ) from error
        if values["format"] != file_format:
            raise OtherFormatError(storage.root_uri, values["format"])
        files: Mapping[str, FileSum]
        if (pages := values.pop("pages", None)) is not None:
            files = FilePages.of_json(storage, pages)
        else:
            files = {name: FileSum(**sums) for name, sums in values.pop("files").items()}
        return cls(**values, files=files)


class OtherFormatError(UserError):
    """Prepared data is whole and in another format (exit 65)."""

    def __init__(self, uri: str, form: int) -> None:
        fix = f"vlmpipe data convert {shlex.quote(uri)} makes it of this format in seconds, without reading an image"
        if form != CONVERTIBLE:
            fix = "use the version of vlmpipe that wrote it; or delete its DONE file to prepare it again"
        super().__init__(
            f"the prepared data in {uri} is of format {form}", expected=f"format {FORMAT}", fix=fix, code=ExitCode.DATA
        )


def why_unread(error: UserError) -> str:
    """Why prepared data cannot be read, in few words; of data in another format also what makes it readable."""
    return f"{error.found} ({error.fix})" if isinstance(error, OtherFormatError) else error.found


class PreparedFiles:
    """Reads prepared data and checks each file but the shards, which their readers check against the sidecars."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._files = storage, Manifest.read(storage).files

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """The files in the manifest. Raises DataError when one of them is missing."""
        there = {info.name: info for info in self._storage.list(prefix)}
        for name in self._files:
            if name.startswith(f"{prefix}/" if prefix else "") and name not in there:
                raise damaged_file(self._storage.uri(name), "it is missing")
        return [info for name, info in there.items() if name in self._files]

    def read(self, name: str) -> bytes:
        """Raises DataError when the bytes are not those that were prepared."""
        data = self._storage.read(name)
        self._compare(name, FileSum(len(data), crc32c_of(data)))
        return data

    def fetch(self, name: str) -> Path:
        """Raises DataError as `read` does."""
        path = self._storage.fetch(name)
        if not (name.startswith(f"{FOLDER}/") and name.endswith(".tar")):
            self._compare(name, FileSum.once_a_machine(path))
        return path

    def _compare(self, name: str, actual: FileSum) -> None:
        expected = self._files.get(name)
        if expected is None:
            raise damaged_file(self._storage.uri(name), f"{DONE} does not list it")
        if actual.bytes != expected.bytes:
            raise damaged_file(self._storage.uri(name), f"{actual.bytes} bytes instead of {expected.bytes}")
        if actual != expected:
            raise damaged_file(self._storage.uri(name), f"its checksum (CRC32C) differs from that in {DONE}")


def open_prepared(uri: str) -> Storage:
    """The store of prepared data, to read from. Raises as `Manifest.read`."""
    return cast(Storage, PreparedFiles(open_storage(uri)))
