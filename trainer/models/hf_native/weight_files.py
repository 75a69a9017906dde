"""Safetensors files of published models: on this machine, or read in passing where they lie.

A training reads them from the disk of its node, to which its processes copy each file once. An export needs each
tensor twice, and has a small disk: within `read_in_passing` it reads ranges of files in buckets and on the hub.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

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

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata

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


class WeightFiles:
    """Files of one published model.

    find: where a file is, on this machine or elsewhere; None for one that the model does not have. published: of which
    revision its index is read.
    """

    def __init__(self, find: Callable[[str], Path | Source | None], published: WeightsConfig, sums: Sums) -> None:
        self._find, self._published, self._sums = functools.cache(find), published, sums
        self._ranged: dict[str, RangedFile] = {}
        self._whole: set[str] = set()

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def index(self) -> Path | None:
        """The index of its shards, on this machine; None for a model without."""
        found = self._find(SAFE_WEIGHTS_INDEX_NAME)
        return (
            model_file(self._published, SAFE_WEIGHTS_INDEX_NAME, weights=False) if isinstance(found, Source) else found
        )

    def opened(self, name: str) -> OpenedFile:
        """A safetensors file that it has, as `safetensors.safe_open` gives it."""
        place = self._find(name)
        assert place, "has() was asked"
        if isinstance(place, Source):
            return self._ranged.setdefault(name, RangedFile(place, self._sums))
        if name not in self._whole:
            read_header(place)  # safetensors' own errors name no file
            self._whole.add(name)
        return safe_open(place, framework="pt")


def weight_files(part: WeightsConfig) -> WeightFiles:
    """The files of a published model. Raises as `local_folder` does, and UserError for a hub out of reach."""
    sums = _passing.get()
    if sums is not None and (folder := folder_in_bucket(part.weights, part.revision)):
        store, files = folder.store, folder.files
        return WeightFiles(lambda name: _in_store(store, files[name]) if name in files else None, part, sums)
    if sums is not None and local_folder(part.weights, part.revision, weights=False) is None:
        of_commit = _at_commit(part)
        return WeightFiles(lambda name: _in_cache(of_commit, name) or _on_hub(of_commit, name), of_commit, sums)
    return WeightFiles(functools.partial(model_file, part), part, {})


def _in_store(store: Storage, info: ObjectInfo) -> Source:
    """One version of an object: another one is refused by the store."""
    uri = store.uri(info.name)

    def read(start: int, end: int) -> bytes:
        try:
            return store.read_range(info.name, start, end, version=info.version)
        except VersionConflictError as error:
            raise DataError(
                f"{uri} was replaced while it was read", fix="repeat the step when no program writes there"
            ) from error

    return Source(uri, info.size_bytes, read)


def _at_commit(part: WeightsConfig) -> WeightsConfig:
    """The part with a commit as its revision: the one of which this machine has a copy, else that of the hub."""
    names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    commits = (path.parent.name for name in names if (path := _in_cache(part, name)))
    on_hub = (found.commit_hash for name in names if (found := _look_up(part, name)))
    commit = next(itertools.chain(commits, on_hub), None)
    return part.model_copy(update={"revision": commit}) if commit else part


def _in_cache(part: WeightsConfig, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(part.weights, name, revision=part.revision or None)
    return Path(found) if isinstance(found, str) else None


def _look_up(part: WeightsConfig, name: str) -> HfFileMetadata | None:
    """Return the file's commit and size on the hub, or None if the repository has no such file."""
    from huggingface_hub.errors import EntryNotFoundError

    with readable_hub_errors(part.weights, part.revision, name):
        try:
            return file_on_hub(part.weights, part.revision, name)
        except EntryNotFoundError:
            return None


def _on_hub(part: WeightsConfig, name: str) -> Source | None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    if (found := _look_up(part, name)) is None:
        return None
    url = hf_hub_url(part.weights, name, revision=found.commit_hash)

    def read(start: int, end: int) -> bytes:
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}
        with readable_hub_errors(part.weights, part.revision, name):
            answer = http_backoff("GET", url, headers=headers, timeout=HUB_S)
            hf_raise_for_status(answer)
            return bytes(answer.content)

    assert found.size is not None, "file_on_hub has looked"
    return Source(f"{part.weights}@{found.commit_hash}/{name}", found.size, read)
