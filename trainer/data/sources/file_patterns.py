"""Finds the files of a `data.source`: file, folder, or pattern with braces and wildcards; local or in a bucket."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import product
from pathlib import Path

from vlmpipe.trainer.data.shards.disk_cache import open_shards
from vlmpipe.trainer.data.shards.verified_files import ShardFiles
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError, os_errors
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import ObjectInfo, Storage
from vlmpipe.trainer.storage.file_sums import crc32c_in
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.regular_files import (
    NotRegularFileError,
    head_of,
    kind_of,
    open_regular,
    stand_in_of,
)

SPECIAL = re.compile(r"[{*?\[]")
BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\d+)\.\.(\d+)")
HUB_ID = re.compile(r"[\w-]+/[\w-]+")  # as a data set of the Hugging Face hub is called, or a path without a suffix
MAX_FILES = 1_000_000  # of a brace pattern
SHARE_OF_CACHE = 0.5  # the prepared data needs disk space, too


@dataclass(frozen=True)
class Files:
    """The files of a source, by name under one root."""

    source: str  # as in the run file
    storage: Storage
    infos: tuple[ObjectInfo, ...]  # sorted by name; of a folder, all files below it
    is_folder: bool = False
    cache_gib: float = 0.0  # disk for files of a bucket; see `open_shards`

    @property
    def names(self) -> list[str]:
        return [info.name for info in self.infos]

    def ending(self, suffix: str) -> Files:
        """The files whose names end with the suffix."""
        return replace(self, infos=tuple(info for info in self.infos if info.name.endswith(suffix)))

    def named(self, name: str) -> Files:
        """The file of that name alone."""
        return replace(self, infos=tuple(info for info in self.infos if info.name == name), is_folder=False)

    def fingerprint(self) -> str:
        """Hexadecimal; changes with any file's name or bytes. Files of a folder are looked at again."""
        if not isinstance(self.storage, LocalStorage):
            return fingerprint_of(self.infos)
        digest = hashlib.sha256()
        for name in self.names:
            path = self.storage.root / name
            try:
                stat = path.stat()
            except OSError:  # a loop of links, or gone: named when it is read
                digest.update(f"{name} cannot be read\n".encode("utf-8", "surrogateescape"))
                continue
            # The time of a change is the system's: tools that restore the time of modification do not set it.
            digest.update(
                f"{name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}\n".encode(
                    "utf-8", "surrogateescape"
                )
            )
        return digest.hexdigest()

    def path(self, name: str) -> Path:
        """A local path of the file, to be read with `open_regular`. Links in a source are followed."""
        if isinstance(self.storage, LocalStorage):
            return self.storage.root / name
        return self.storage.fetch(name)

    @contextmanager
    def opened(self, name: str) -> Iterator[Path]:
        """A local path of the file inside the block, readable even if the cache evicts the file meanwhile."""
        uri = self.storage.uri(name)
        if isinstance(self.storage, LocalStorage):
            with os_errors(f"reading {uri}"), open_regular(self.path(name)) as file:
                yield Path(f"/dev/fd/{file.fileno()}")
            return
        with os_errors(f"fetching {uri}"), self._cached.opened(name) as locked:
            handle = os.dup(locked)
        # Without its lock: two processes that each hold one file and wait for the next would deadlock.
        try:
            with os_errors(f"reading {uri}"):
                yield Path(f"/dev/fd/{handle}")
        finally:
            os.close(handle)

    @contextmanager
    def naming_stand_ins(self, *names: str) -> Iterator[None]:
        """Let an error about the files in the block name their kind, where known: a pointer, a web page."""
        try:
            yield
        except DataError as error:
            for name in names or self.names[:1]:
                if stand_in := stand_in_of(head_of(self.path(name))):
                    what, fix = stand_in
                    raise DataError(
                        f"{self.storage.uri(name)} is {what}", expected="the data itself", fix=fix
                    ) from error
            raise

    @cached_property
    def _cached(self) -> ShardFiles:
        sources = SourceFiles(self.storage, self.infos)
        return open_shards(sources, cache_gib=self.cache_gib, share=SHARE_OF_CACHE)[0]


@dataclass(frozen=True)
class SourceSums:
    """Size and checksum of a source's file, as the bucket has them."""

    bytes: int
    crc32c: int | None


class SourceFiles:
    """Files of a bucket, fetched whole and verified by the bucket's own size and, if it keeps one, checksum."""

    kind = "sources"

    def __init__(self, storage: Storage, infos: Iterable[ObjectInfo]) -> None:
        self.storage = storage
        self._infos = {info.name: info for info in infos}

    def sizes(self) -> dict[str, int]:
        return {name: info.size_bytes for name, info in self._infos.items()}

    def sidecar(self, shard: str) -> SourceSums:
        info = self._infos[shard]
        return SourceSums(info.size_bytes, crc32c_in(self.storage, info))

    def damaged(self, shard: str, how: str) -> DataError:
        return DataError(
            f"{self.storage.uri(shard)} cannot be read: {how}",
            expected="the bytes that were there when the run began",
            fix="run again when data.source no longer changes",
        )


def fingerprint_of(infos: Iterable[ObjectInfo]) -> str:
    """A hash of names, sizes and checksums, or in a folder, which has no checksums, of modification times."""
    digest = hashlib.sha256()
    for info in infos:
        digest.update(f"{info.name} {info.size_bytes} {info.crc32c or info.version}\n".encode())
    return digest.hexdigest()


def find_files(source: str, cache_gib: float = 0.0) -> Files:
    """The files that `source` names; those of a bucket are read through a cache of at most `cache_gib`.

    Raises ConfigError when there are none, DataError when some files of a brace pattern are missing.
    """
    root, name = _root_and_name(source)
    storage = _open_folder(root)
    if isinstance(storage, LocalStorage) and (kind := kind_of(storage.root / name)):
        raise NotRegularFileError(f"data.source {source!r}", kind)
    if name and (info := storage.stat(name)):
        return Files(source, storage, (info,), cache_gib=cache_gib)
    is_folder = isinstance(storage, LocalStorage) and (storage.root / name).is_dir()
    if SPECIAL.search(name) and not is_folder:
        return replace(_matching(source, storage, name), cache_gib=cache_gib)
    storage = _open_folder(source)
    infos = tuple(storage.list())
    if not infos:
        folder = storage.root if isinstance(storage, LocalStorage) else None
        if folder and folder.is_dir():
            raise ConfigError(
                f"data.source {source!r} is an empty folder",
                expected="a folder with images, tar or Parquet files, or a LLaVA or COCO file",
            )
        where = f" (looked for {storage.root_uri})" if storage.root_uri != source else ""
        raise ConfigError(
            f"data.source {source!r} does not exist{where}",
            expected="an existing LLaVA file, tar, Parquet file, COCO file or folder; a relative path starts at the "
            "current folder",
            fix=f"a data set of the hub is fetched first: vlmpipe data fetch {source}"
            if HUB_ID.fullmatch(source)
            else "",
        )
    return Files(source, storage, infos, is_folder=True, cache_gib=cache_gib)


def _root_and_name(source: str) -> tuple[str, str]:
    """The folder before the first wildcard, and the rest."""
    special = SPECIAL.search(source)
    cut = source.rstrip("/").rfind("/", 0, special.start() if special else len(source))
    if cut < 0:
        return ".", source
    root, name = source[:cut] or "/", source[cut + 1 :].rstrip("/")
    return (source, "") if root in ("gs:/", "gs:") else (root, name)


def _open_folder(uri: str) -> Storage:
    try:
        return open_storage(uri)
    except UserError as error:
        if error.code != ExitCode.CONFIG:
            raise
        raise ConfigError(f"data.source: {error.found}", expected=error.expected, fix=error.fix) from error


def _matching(source: str, storage: Storage, pattern: str) -> Files:
    there = storage.list()
    matching: dict[str, ObjectInfo] = {}
    missing = []
    for alternative in _expanded(pattern):
        if SPECIAL.search(alternative):
            matches = [info for info in there if _matches(info.name, alternative)]
        else:
            matches = [info for info in there if info.name == alternative]
        matching |= {info.name: info for info in matches}
        missing += [] if matches else [alternative]
    if not matching:
        raise ConfigError(
            f"data.source {source!r} matches no file (looked in {storage.root_uri})",
            expected="a pattern such as train-{000000..000099}.tar or *.parquet",
        )
    if missing:
        raise DataError(
            f"{len(missing)} of the files that data.source {source!r} names are missing, the first is {missing[0]}",
            expected="every file of the brace pattern",
            fix="fetch the missing files, or correct the pattern",
        )
    return Files(source, storage, tuple(matching[name] for name in sorted(matching)))


def _matches(name: str, pattern: str) -> bool:
    """Return whether the name matches. As in a shell, a wildcard does not match a slash."""
    parts, patterns = name.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _expanded(pattern: str) -> list[str]:
    """`{a,b}` and `{000..012}` expanded, as in a shell."""
    pieces = BRACES.split(pattern)
    choices = [[piece] if place % 2 == 0 else _choices(piece) for place, piece in enumerate(pieces)]
    size = math.prod(map(len, choices))
    if size > MAX_FILES:
        raise ConfigError(f"data.source {pattern!r} means {size} files", expected=f"at most {MAX_FILES}")
    return ["".join(parts) for parts in product(*choices)]


def _choices(inside: str) -> list[str]:
    if match := RANGE.fullmatch(inside):
        first, last = int(match[1]), int(match[2])
        if abs(last - first) > MAX_FILES:
            raise ConfigError(f"data.source has the range {inside!r}", expected=f"at most {MAX_FILES} files")
        width = max(len(match[1]), len(match[2])) if match[1].startswith("0") else 0
        step = 1 if last >= first else -1
        return [f"{number:0{width}d}" for number in range(first, last + step, step)]
    return inside.split(",")
