"""Safetensors files of published models: on this machine, or read in passing where they lie.

A training reads them from the disk of its node, to which its processes copy each file once. An export needs each
tensor twice, and has a small disk: within `read_in_passing` it reads ranges of files in buckets and on the hub.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import google_crc32c
import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.models.published import model_file
from vlmpipe.trainer.models.safetensors_header import Place, places_in, read_header
from vlmpipe.trainer.sizing.export_size import IN_FLIGHT_BYTES
from vlmpipe.trainer.storage.base import ObjectInfo, Storage, VersionConflictError
from vlmpipe.trainer.storage.bucket import TRANSFER_ATTEMPTS
from vlmpipe.trainer.storage.hub.client import file_on_hub, readable_hub_errors
from vlmpipe.trainer.storage.model_folders import folder_in_bucket, local_folder
from vlmpipe.trainer.storage.transfer import in_parallel

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
READ = {name: dtype for dtype, name in DTYPES.items()} | {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
THREADS = 8
PIECE_BYTES = 32 << 20  # of one request
HUB_S = 60.0  # without a byte from the hub, after which a request is tried again
Sums = MutableMapping[tuple[str, str], int]  # CRC32C of a tensor by file and name
_passing: ContextVar[Sums | None] = ContextVar("passing", default=None)


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
        path = self._find(SAFE_WEIGHTS_INDEX_NAME)
        return model_file(self._published, SAFE_WEIGHTS_INDEX_NAME, weights=False) if isinstance(path, Source) else path

    def opened(self, name: str) -> safe_open | RangedFile:
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
    on_hub = (file.commit_hash for name in names if (file := _look_up(part, name)))
    commit = next(itertools.chain(commits, on_hub), None)
    return part.model_copy(update={"revision": commit}) if commit else part


def _in_cache(part: WeightsConfig, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(part.weights, name, revision=part.revision or None)
    return Path(path) if isinstance(path, str) else None


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

    if (file := _look_up(part, name)) is None:
        return None
    url = hf_hub_url(part.weights, name, revision=file.commit_hash)

    def read(start: int, end: int) -> bytes:
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}
        with readable_hub_errors(part.weights, part.revision, name):
            answer = http_backoff("GET", url, headers=headers, timeout=HUB_S)
            hf_raise_for_status(answer)
            return bytes(answer.content)

    assert file.size is not None, "file_on_hub has looked"
    return Source(f"{part.weights}@{file.commit_hash}/{name}", file.size, read)


@dataclass(frozen=True)
class Source:
    """A file elsewhere. read: bytes of it, from one place to another.

    It raises UserError, also where the file is no longer the one that was looked up.
    """

    uri: str
    size_bytes: int
    read: Callable[[int, int], bytes]


class RangedFile:
    """The part of `safetensors.safe_open` that reads weights. Raises DataError for a damaged file.

    A tensor that `sums` holds from an earlier reading must have the same bytes again; others are added to it.
    """

    def __init__(self, source: Source, sums: Sums) -> None:
        self._source, self._sums = source, sums

    def __enter__(self) -> RangedFile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> Iterator[str]:
        return iter(self._places)

    def get_tensor(self, name: str) -> Tensor:
        place, key = self._places[name], (self._source.uri, name)
        if place.dtype not in READ:
            raise self._damaged(f"{name} has the type {place.dtype}, which is not read here")
        for _ in range(TRANSFER_ATTEMPTS):
            data, checksum = self._read(place.start, place.end)
            if self._sums.setdefault(key, checksum) == checksum:
                break
        else:
            raise self._damaged(f"{name} has other bytes than when it was first read")
        dtype = READ[place.dtype]
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(place.shape)

    def get_slice(self, name: str) -> RangedTensor:
        return RangedTensor(self, name, self._places[name].shape)

    @cached_property
    def _places(self) -> dict[str, Place]:
        source = self._source  # a proxy may have announced another size
        return places_in(source.uri, source.size_bytes, lambda *at: bytes(self._read(*at)[0]), may_be_longer=True)

    def _read(self, start: int, end: int) -> tuple[bytearray, int]:
        """Bytes of the file, and their CRC32C."""
        pieces = [(at, min(at + PIECE_BYTES, end)) for at in range(start, end, PIECE_BYTES)]
        arriving = in_parallel(
            lambda piece: self._source.read(*piece),
            pieces,
            threads=min(THREADS, max(1, len(pieces))),
            weigh=lambda piece: piece[1] - piece[0],
            max_bytes=IN_FLIGHT_BYTES,
        )
        data, crc32c = bytearray(end - start), 0
        for (first, stop), arrived in zip(pieces, arriving, strict=True):
            if len(arrived) != stop - first:
                raise self._damaged(f"bytes {first} to {stop} of it arrive as {len(arrived)}")
            data[first - start : stop - start] = arrived
            crc32c = int(google_crc32c.extend(crc32c, arrived))
        return data, crc32c

    def _damaged(self, how: str) -> DataError:
        return DataError(
            f"{self._source.uri}: {how}",
            expected="a whole safetensors file that does not change while it is read",
            fix="copy the model there again, and repeat the step",
        )


class RangedTensor:
    """A tensor whose shape is known and whose numbers are read when some of them are asked for."""

    def __init__(self, file: RangedFile, name: str, shape: tuple[int, ...]) -> None:
        self._file, self._name, self._shape = file, name, shape

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, rows: slice) -> Tensor:
        return self._tensor[rows]

    @cached_property
    def _tensor(self) -> Tensor:
        return self._file.get_tensor(self._name)
