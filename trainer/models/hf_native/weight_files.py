"""Safetensors files of published models: on this machine, or read in passing where they lie.

A training reads them from the disk of its node, to which its processes copy each file once. An export needs each
tensor twice, and has a small disk: within `read_in_passing` it reads ranges of files in buckets and on the hub.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from vlmpipe.trainer.config.model import WeightsConfig
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.models.hf_native.safetensors_ranges import RangedFile, Source, Sums
from vlmpipe.trainer.models.hub_errors import file_on_hub, readable_hub_errors
from vlmpipe.trainer.models.published import model_file
from vlmpipe.trainer.models.safetensors_header import read_header
from vlmpipe.trainer.storage.base import ObjectInfo, Storage, VersionConflictError
from vlmpipe.trainer.storage.model_folders import folder_in_bucket, local_folder

HUB_S = 60.0  # without a byte from the hub, after which a request is tried again
_passing: ContextVar[Sums | None] = ContextVar("passing", default=None)


class Rows(Protocol):
    """A tensor of a file, of which slices are read."""

    def get_shape(self) -> Sequence[int]: ...
    def __getitem__(self, rows: slice, /) -> Tensor: ...


class OpenedFile(Protocol):
    """The part of `safetensors.safe_open` that reads weights."""

    def __enter__(self) -> OpenedFile: ...
    def __exit__(self, kind: object, error: object, trace: object, /) -> object: ...
    def keys(self) -> Iterable[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...
    def get_slice(self, name: str) -> Rows: ...


class WeightFiles(Protocol):
    """Files of one published model."""

    def has(self, name: str) -> bool: ...

    def index(self) -> Path | None:
        """The index of its shards, on this machine; None for a model without."""
        ...

    def opened(self, name: str) -> OpenedFile:
        """A safetensors file that it has, as `safetensors.safe_open` gives it."""
        ...


@contextlib.contextmanager
def read_in_passing() -> Iterator[None]:
    """Read published weights where they lie, and copy none to this machine.

    What is not a file of safetensors is still loaded whole. A tensor that is read again has the bytes of its first
    reading, so a digest of weights that were read holds for those that are read later. DataError otherwise.
    """
    token = _passing.set({})
    try:
        yield
    finally:
        _passing.reset(token)


def weight_files(part: WeightsConfig) -> WeightFiles:
    """The files of a published model. Raises as `local_folder` does, and UserError for a hub out of reach."""
    sums = _passing.get()
    if sums is not None and (folder := folder_in_bucket(part.weights, part.revision)):
        return _InBucket(part, folder.store, folder.files, sums)
    if sums is not None and local_folder(part.weights, part.revision, weights=False) is None:
        return _OnHub(part, sums)
    return _OnDisk(part)


class _OnDisk:
    def __init__(self, part: WeightsConfig) -> None:
        self._part = part
        self._paths: dict[str, Path | None] = {}
        self._whole: set[Path] = set()

    def has(self, name: str) -> bool:
        return self._path(name) is not None

    def index(self) -> Path | None:
        return self._path(SAFE_WEIGHTS_INDEX_NAME)

    def opened(self, name: str) -> OpenedFile:
        path = self._path(name)
        assert path, "has() was asked"
        if path not in self._whole:
            read_header(path)  # safetensors' own errors name no file
            self._whole.add(path)
        return safe_open(path, framework="pt")

    def _path(self, name: str) -> Path | None:
        if name not in self._paths:
            self._paths[name] = model_file(self._part, name)
        return self._paths[name]


class _InBucket:
    def __init__(self, part: WeightsConfig, store: Storage, files: dict[str, ObjectInfo], sums: Sums) -> None:
        self._part, self._store, self._files, self._sums = part, store, files, sums
        self._open: dict[str, RangedFile] = {}

    def has(self, name: str) -> bool:
        return name in self._files

    def index(self) -> Path | None:
        return model_file(self._part, SAFE_WEIGHTS_INDEX_NAME, weights=False)

    def opened(self, name: str) -> OpenedFile:
        if name not in self._open:
            self._open[name] = RangedFile(_Object(self._store, self._files[name]), self._sums)
        return self._open[name]


@dataclass(frozen=True)
class _Object:
    """One version of an object: another one is refused by the store."""

    store: Storage
    info: ObjectInfo

    @property
    def uri(self) -> str:
        return self.store.uri(self.info.name)

    @property
    def size_bytes(self) -> int:
        return self.info.size_bytes

    def read(self, start: int, end: int) -> bytes:
        try:
            return self.store.read_range(self.info.name, start, end, version=self.info.version)
        except VersionConflictError as error:
            raise DataError(
                f"{self.uri} was replaced while it was read", fix="repeat the step when no program writes there"
            ) from error


class _OnHub:
    """Files of one commit: that of the revision, or the one of which this machine has a copy."""

    def __init__(self, part: WeightsConfig, sums: Sums) -> None:
        self._part, self._sums = part, sums
        self._open: dict[str, RangedFile] = {}
        self._sources: dict[str, Source | None] = {}

    def has(self, name: str) -> bool:
        return self._cached(name) is not None or self._source(name) is not None

    def index(self) -> Path | None:
        return model_file(self._at_commit, SAFE_WEIGHTS_INDEX_NAME)

    def opened(self, name: str) -> OpenedFile:
        if path := self._cached(name):
            return safe_open(path, framework="pt")
        if name not in self._open:
            source = self._source(name)
            assert source, "has() was asked"
            self._open[name] = RangedFile(source, self._sums)
        return self._open[name]

    @cached_property
    def _at_commit(self) -> WeightsConfig:
        """The part with the commit as its revision."""
        names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
        there = next(filter(None, (_in_cache(self._part, name) for name in names)), None)
        if there:
            return self._part.model_copy(update={"revision": there.parent.name})
        found = next(filter(None, (_look_up(self._part, name) for name in names)), None)
        return self._part.model_copy(update={"revision": found.commit}) if found else self._part

    def _cached(self, name: str) -> Path | None:
        return _in_cache(self._at_commit, name)

    def _source(self, name: str) -> Source | None:
        if name not in self._sources:
            self._sources[name] = _look_up(self._at_commit, name)
        return self._sources[name]


@dataclass(frozen=True)
class _HubFile:
    part: WeightsConfig
    name: str
    commit: str
    size_bytes: int

    @property
    def uri(self) -> str:
        return f"{self.part.weights}@{self.commit}/{self.name}"

    def read(self, start: int, end: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        url = hf_hub_url(self.part.weights, self.name, revision=self.commit)
        with readable_hub_errors(self.part.weights, self.part.revision, self.name):
            answer = http_backoff(
                "GET", url, headers={**build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}, timeout=HUB_S
            )
            hf_raise_for_status(answer)
            return bytes(answer.content)


def _in_cache(part: WeightsConfig, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(part.weights, name, revision=part.revision or None)
    return Path(found) if isinstance(found, str) else None


def _look_up(part: WeightsConfig, name: str) -> _HubFile | None:
    """Return the file's revision and size on the hub, or None if the repository has no such file."""
    from huggingface_hub.errors import EntryNotFoundError

    with readable_hub_errors(part.weights, part.revision, name):
        try:
            found = file_on_hub(part.weights, part.revision, name)
        except EntryNotFoundError:
            return None
    assert found.commit_hash and found.size is not None
    return _HubFile(part, name, found.commit_hash, found.size)
