"""The images of a feature store in the order of their hashes, and the shard of each.

Of a large store one process of a machine reads the sidecars and writes these arrays into a file of the cache folder,
which all processes of the machine map, under a lock of the kernel as for packing plans. The file is named after the
store's list of files, so that new shards lead to a new one.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.data.packing import Int64Array
from vlmpipe.trainer.data.shards.disk_cache import alone
from vlmpipe.trainer.data.shards.image_index import HASH_BYTES, HASHES, hashes_of
from vlmpipe.trainer.data.shards.verified_files import Sidecar
from vlmpipe.trainer.errors import UserError, print_warning
from vlmpipe.trainer.storage.base import ObjectInfo, cache_folder
from vlmpipe.trainer.storage.file_sums import FileSum
from vlmpipe.trainer.storage.records import seal, unseal

SHARED_FROM_BYTES = 16 << 20  # of sidecars, of some 240,000 images; below, each process reads them in about a second
CACHE_FOLDER = ".features"  # in the cache folder
KEPT = 4  # stores on a machine, those used last
LEFT_S = 86_400  # an array without a description that is older is no longer being written
FILES = 64  # that rows are sorted into
SPOOLED_BYTES = 1 << 16  # of each file, in memory
ROW = np.dtype([("image", HASHES), ("shard", "<i4"), ("place", "<i4")])
IN_MEMORY = (
    "each process reads the sidecars and holds some 40 bytes an image; set VLMPIPE_CACHE_DIR to a disk with room"
)


@dataclass(frozen=True)
class HeldImages:
    """The images of one shard, as its sidecar lists them."""

    sidecar: Sidecar
    tower_sha256: str
    images: Sequence[str]


@dataclass(frozen=True)
class StoredShards:
    """The complete shards of a store. `lost`: names of shards that do not count; `tower_sha256`: None without any."""

    sidecars: tuple[Sidecar, ...] = ()
    tower_sha256: str | None = None
    lost: tuple[str, ...] = ()


Shards = Iterable[HeldImages | str]  # a name is that of a lost shard
Read = Callable[[], Shards]


@dataclass(frozen=True)
class ImagePlaces:
    """Arrays of all images, in the order of their hashes; equal ones in the order of their shards."""

    images: NDArray[np.bytes_]  # (images,)
    shards: NDArray[np.int32]  # (images,) number of the shard
    places: NDArray[np.int32]  # (images,) place among the shard's images in the order of their hashes

    def find(self, requested: Iterable[str] | NDArray[np.bytes_]) -> Int64Array:
        """(wanted,) position of each image, -1 if missing."""
        hashes = requested if isinstance(requested, np.ndarray) else hashes_of(requested)
        if not len(self.images):
            return np.full(len(hashes), -1)
        places = np.minimum(np.searchsorted(self.images, hashes), len(self.images) - 1)
        return np.where(self.images[places] == hashes, places, -1)


def open_places(uri: str, files: Sequence[ObjectInfo], read: Read) -> tuple[StoredShards, ImagePlaces]:
    """The shards and images of a store. files: its list. read: the sidecars; raises what is wrong with them."""
    if sum(info.size_bytes for info in files if info.name.endswith(".json")) < SHARED_FROM_BYTES:
        return _in_memory(read())
    digest = hashlib.sha256(f"{uri}\n".encode())
    for info in files:
        digest.update(f"{info.name} {info.size_bytes} {info.version} {info.crc32c}\n".encode())
    key = digest.hexdigest()[:32]
    try:
        folder = cache_folder() / CACHE_FOLDER
        folder.mkdir(exist_ok=True)
    except (UserError, OSError) as error:
        return _without_files(read, error)
    try:
        with alone(folder / f"{key[:2]}.lock"):
            stored = _open(folder / key)
            if stored is None:
                _write(folder / key, read())
                _delete_oldest(folder)
                stored = _open(folder / key)
    except OSError as error:  # a full disk, or a folder that cannot be written to or locked
        return _without_files(read, error)
    return stored or _in_memory(read())


def _without_files(read: Read, error: UserError | OSError) -> tuple[StoredShards, ImagePlaces]:
    print_warning(f"the list of features cannot be kept on this machine's disk: {error}: {IN_MEMORY}")
    return _in_memory(read())


def _in_memory(shards: Shards) -> tuple[StoredShards, ImagePlaces]:
    listing = _Listing()
    rows = np.concatenate([np.empty(0, ROW), *listing.rows(shards)])
    return listing.found(), _arrays(_in_order(rows))


class _Listing:
    """Collects facts about shards while their images become rows."""

    def __init__(self) -> None:
        self._sidecars: list[Sidecar] = []
        self._lost: list[str] = []
        self._tower: str | None = None

    def rows(self, shards: Shards) -> Iterator[NDArray[np.void]]:
        """The rows of each complete shard."""
        for shard in shards:
            if isinstance(shard, str):
                self._lost.append(shard)
                continue
            hashes = hashes_of(shard.images)
            rows = np.empty(len(hashes), ROW)
            rows["image"], rows["shard"] = hashes, len(self._sidecars)
            rows["place"][np.argsort(hashes, kind="stable")] = np.arange(len(hashes))
            self._sidecars.append(shard.sidecar)
            self._tower = shard.tower_sha256
            yield rows

    def found(self) -> StoredShards:
        return StoredShards(tuple(self._sidecars), self._tower, tuple(self._lost))


def _write(path: Path, shards: Shards) -> None:
    """Write the arrays, and then what completes them, in memory that does not grow with the images."""
    listing, counts = _Listing(), np.zeros(FILES, np.int64)
    part = path.with_suffix(".part")
    with ExitStack() as opened:
        # In memory until there is much in them: making 64 files takes longer than listing a small store.
        files = [
            opened.enter_context(tempfile.SpooledTemporaryFile(SPOOLED_BYTES, "w+b", dir=str(path.parent)))
            for _ in range(FILES)
        ]
        for rows in listing.rows(shards):
            numbers = np.frombuffer(rows["image"].tobytes(), np.uint8)[::HASH_BYTES] // (256 // FILES)
            for number in np.unique(numbers).tolist():
                files[number].write(rows[numbers == number].tobytes())
            counts += np.bincount(numbers, minlength=FILES)
        try:
            _write_columns(part, files, int(counts.sum()))
        except OSError:
            part.unlink(missing_ok=True)
            raise
    part.replace(path)
    stored = listing.found()
    content: dict[str, object] = asdict(replace(stored, sidecars=())) | {"file": asdict(FileSum.once_a_machine(path))}
    content["sidecars"] = [
        [sidecar.shard, sidecar.samples, sidecar.bytes, sidecar.crc32c] for sidecar in stored.sidecars
    ]
    path.with_suffix(".json").write_bytes(seal(content))


def _write_columns(part: Path, files: Iterable[IO[bytes]], total: int) -> None:
    """Write the columns of the rows in `files`, one after the other."""
    done = 0
    with part.open("wb") as out:
        out.truncate(total * ROW.itemsize)
        for file in files:
            file.seek(0)
            rows = _in_order(np.frombuffer(file.read(), ROW))
            start = 0
            for name in ROW.names or ():
                width = ROW[name].itemsize
                out.seek(start + done * width)
                out.write(np.ascontiguousarray(rows[name]).tobytes())
                start += total * width
            done += len(rows)


def _open(path: Path) -> tuple[StoredShards, ImagePlaces] | None:
    """The arrays of a file; None where it is missing or damaged."""
    described = path.with_suffix(".json")
    try:
        content = unseal(described.read_bytes(), required=True)
        if FileSum.once_a_machine(path) != FileSum(**content["file"]):
            return None
    except (FileNotFoundError, ValueError):
        return None
    os.utime(described)
    sidecars = tuple(Sidecar(*values) for values in content["sidecars"])
    total, start, columns = path.stat().st_size // ROW.itemsize, 0, {}
    mapped = np.memmap(path, np.uint8, "r") if total else np.empty(0, np.uint8)
    for name in ROW.names or ():
        stop = start + total * ROW[name].itemsize
        columns[name] = np.asarray(mapped[start:stop].view(ROW[name]))
        start = stop
    stored = StoredShards(sidecars, content["tower_sha256"], tuple(content["lost"]))
    return stored, ImagePlaces(columns["image"], columns["shard"], columns["place"])


def _in_order(rows: NDArray[np.void]) -> NDArray[np.void]:
    return rows[np.argsort(rows["image"], kind="stable")]


def _arrays(rows: NDArray[np.void]) -> ImagePlaces:
    return ImagePlaces(*(np.ascontiguousarray(rows[name]) for name in ROW.names or ()))


def _delete_oldest(folder: Path) -> None:
    """Delete the files whose last use is longest ago, and what killed processes left. Whoever has mapped one keeps its
    content.
    """
    with suppress(FileNotFoundError):  # another process deletes, too
        for described in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)[:-KEPT]:
            for path in (described, described.with_suffix("")):
                path.unlink(missing_ok=True)
        for path in folder.iterdir():
            is_array = path.suffix in ("", ".part")
            if is_array and not path.with_suffix(".json").exists() and time.time() - path.stat().st_mtime > LEFT_S:
                path.unlink(missing_ok=True)
