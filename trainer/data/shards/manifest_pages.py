"""The list of the files of a large set of prepared data: pages, each read when a file on it is asked for."""

from __future__ import annotations

import functools
import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vlmpipe.trainer.data.shards.verified_files import damaged_file
from vlmpipe.trainer.storage.base import Storage, crc32c_of
from vlmpipe.trainer.storage.file_sums import UPLOADS, FileSum
from vlmpipe.trainer.storage.records import seal, unseal
from vlmpipe.trainer.storage.transfer import in_parallel

PAGES_FOLDER = "manifest"
PAGE_FILES = 1024  # some 90 KB; a shorter list stays in the manifest
HELD = 8  # pages in memory


@dataclass(frozen=True)
class Page:
    """Files in the order of their names. name: of the page, by its content, so that a new list overwrites nothing."""

    name: str
    first: str  # name of its first file
    files: int
    crc32c: int


class FilePages(Mapping[str, FileSum]):
    """The sums of files by name. Raises DataError when a page that is read is missing or damaged."""

    def __init__(self, storage: Storage, pages: Sequence[Page]) -> None:
        self.pages = tuple(pages)
        self._storage, self._firsts = storage, [page.first for page in pages]
        self._of_page = functools.lru_cache(maxsize=HELD)(self._read)

    @classmethod
    def write(cls, storage: Storage, files: Mapping[str, FileSum]) -> FilePages:
        """Store the pages of a list."""

        def write(names: Sequence[str]) -> Page:
            content = seal({name: [files[name].bytes, files[name].crc32c] for name in names})
            name = f"{PAGES_FOLDER}/{hashlib.sha256(content).hexdigest()[:32]}.json"
            storage.write(name, content)
            return Page(name, names[0], len(names), crc32c_of(content))

        names = sorted(files)
        pages = (names[start : start + PAGE_FILES] for start in range(0, len(names), PAGE_FILES))
        return cls(storage, list(in_parallel(write, pages, threads=UPLOADS)))

    @classmethod
    def of_json(cls, storage: Storage, pages: Sequence[tuple[str, str, int, int]]) -> FilePages:
        return cls(storage, [Page(*page) for page in pages])

    def as_json(self) -> list[tuple[str, str, int, int]]:
        return [(page.name, page.first, page.files, page.crc32c) for page in self.pages]

    def __len__(self) -> int:
        return sum(page.files for page in self.pages)

    def __iter__(self) -> Iterator[str]:
        for page in self.pages:
            yield from self._of_page(page)

    def __getitem__(self, name: str) -> FileSum:
        place = bisect_right(self._firsts, name) - 1
        if place < 0:
            raise KeyError(name)
        return FileSum(*self._of_page(self.pages[place])[name])

    def _read(self, page: Page) -> Mapping[str, Sequence[int]]:
        if self._storage.stat(page.name) is None:
            raise damaged_file(self._storage.uri(page.name), "it is missing")
        content = self._storage.read(page.name)
        try:
            files = unseal(content, required=True)
        except ValueError as error:
            raise damaged_file(self._storage.uri(page.name), str(error)) from error
        if crc32c_of(content) != page.crc32c:
            raise damaged_file(self._storage.uri(page.name), "its checksum (CRC32C) differs from that in the manifest")
        return files
