"""Cache of remote shards on a machine's disk, of bounded size, shared by its processes.

The folder is the whole state, so processes may start and be killed at any time. `<digest>-<bytes>.whole` is a shard;
`.part` is one being fetched, which counts at full size. Locks are the kernel's (flock) and end with their process:

- `<digest>.lock`, exclusive: one process fetches a shard while others wait.
- `room.lock`, exclusive: makes freeing and taking room one step, and so turning a part into a whole shard.
- the shard itself, shared to read it, exclusive to evict it: shards in use are not evicted.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from vlmpipe.trainer.data.shards.verified_files import ShardFiles, ShardSet, ShardsInPlace, mismatch
from vlmpipe.trainer.errors import ConfigError, os_errors
from vlmpipe.trainer.storage.base import cache_folder, in_bucket
from vlmpipe.trainer.storage.regular_files import open_lock

CACHE_FOLDER = ".shards"  # beside the folders of `Storage.fetch`, which are named after buckets
GIB = 1 << 30
SHARE_OF_FREE_DISK = 0.8
ROOM_LOCK = "room.lock"
FETCHES = 2  # attempts, if a shard arrives damaged
WAIT_FOR_ROOM_S = 0.05
NOW, NEVER = -1, 1 << 62  # next uses
FILE = re.compile(r"([0-9a-f]{16})-(\d+)\.(whole|part)")


class PrefetchResult(Enum):
    """Result of fetching a shard before its use."""

    THERE = "there"
    FETCHED = "fetched"
    BUSY = "busy"  # another thread or process is fetching it
    NO_ROOM = "no room"  # all cached shards are needed sooner, or in use


@dataclass(frozen=True)
class CachedFile:
    """A shard in the folder, whole or being fetched."""

    path: Path
    digest: str  # of the shard's URI
    bytes: int
    whole: bool
    fetched_ns: int


class ShardCache:
    """Shards of a remote store as local files. Evicts the shards that are needed last, if `expect` was called."""

    def __init__(self, shards: ShardSet, folder: Path, limit_bytes: int) -> None:
        self.shards, self._storage, self._folder, self.limit_bytes = shards, shards.storage, folder, limit_bytes
        # Remembered, because every read needs them.
        self._sidecar = functools.cache(shards.sidecar)
        self._digest, self._whole = functools.cache(self._digest_of), functools.cache(self._path_of)
        self._found_whole: dict[str, tuple[int, int]] = {}  # inode and time of verified files, by shard
        self._next_uses: Callable[[], Mapping[str, int]] = dict
        sizes = shards.sizes()
        self.mean_bytes = sum(sizes.values()) / max(1, len(sizes))  # of a shard
        self.num_fitting = limit_bytes // max([1, *sizes.values()])  # shards, at least

    def too_large(self, names: Iterable[str]) -> str | None:
        """The largest of these shards, if the cache cannot hold it."""
        sizes = self.shards.sizes()
        largest = max(names, key=sizes.__getitem__, default=None)
        return largest if largest and sizes[largest] > self.limit_bytes else None

    def require_room(self, names: Iterable[str]) -> None:
        """Raise ConfigError when one of these shards is larger than the cache: it cannot be read whole."""
        if shard := self.too_large(names):
            raise _larger_than_cache(shard, self.shards.sizes()[shard], self.limit_bytes)

    def expect(self, next_uses: Callable[[], Mapping[str, int]]) -> None:
        """Set the function that gives the next step that needs each shard. Shards that it omits are evicted first."""
        self._next_uses = next_uses

    @contextmanager
    def opened(self, shard: str) -> Iterator[int]:
        """A descriptor of the verified shard, fetched if necessary and not evicted during the block."""
        with os_errors(f"keeping {shard} in {self._folder}"):
            handle = self._open(shard)
            if handle is None:
                with alone(self._lock(shard)):
                    handle = self._open(shard)  # another process may have fetched it meanwhile
                    if handle is None:
                        while not self._take_room(shard, NOW):
                            time.sleep(WAIT_FOR_ROOM_S)  # until other processes end a read or a fetch
                        handle = self._fetch(shard)
        try:
            yield handle
        finally:
            _release(handle)

    def fetch_ahead(self, shard: str, needed_at: int, keep: Collection[str] = ()) -> PrefetchResult:
        """Fetch a shard for step `needed_at`. Evicts only shards that are needed later, and none of `keep`.

        Raises as `opened` does.
        """
        if self._is_there(shard):
            return PrefetchResult.THERE
        with os_errors(f"keeping {shard} in {self._folder}"), alone(self._lock(shard), wait=False) as held:
            if not held:
                return PrefetchResult.BUSY
            handle = self._open(shard)
            if handle is None:
                if not self._take_room(shard, needed_at, keep):
                    return PrefetchResult.NO_ROOM
                handle = self._fetch(shard)
            _release(handle)
            return PrefetchResult.FETCHED

    def _is_there(self, shard: str) -> bool:
        """Return whether the shard is in the folder and this process has verified it."""
        is_whole = self._found_whole.get(shard)
        try:
            return is_whole is not None and is_whole == _identity(self._whole(shard).stat())
        except FileNotFoundError:
            return False

    def _open(self, shard: str) -> int | None:
        """A descriptor of the shard, or None if it is not in the folder. A damaged file is deleted."""
        path = self._whole(shard)
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        fcntl.flock(handle, fcntl.LOCK_SH)
        identity = _identity(os.fstat(handle))
        if self._found_whole.get(shard) != identity:
            # By descriptor: another process may have replaced or deleted the file.
            if mismatch(Path(f"/dev/fd/{handle}"), self._sidecar(shard)):
                path.unlink(missing_ok=True)
                _release(handle)
                return None
            self._found_whole[shard] = identity
        return handle

    def _fetch(self, shard: str) -> int:
        """Fetch a shard that has room and is locked by this process. Returns its descriptor."""
        part = self._part(shard)
        try:
            for _ in range(FETCHES):
                self._storage.download(shard, part)
                problem = mismatch(part, self._sidecar(shard))
                if not problem:
                    handle = os.open(part, os.O_RDONLY)
                    fcntl.flock(handle, fcntl.LOCK_SH)  # before others see the name and may evict it
                    with alone(self._folder / ROOM_LOCK):  # or a listing may show both names, or neither
                        part.replace(self._whole(shard))
                    self._found_whole[shard] = _identity(os.fstat(handle))
                    return handle
            raise self.shards.damaged(shard, f"{problem} ({self._storage.uri(shard)} was fetched {FETCHES} times)")
        finally:
            part.unlink(missing_ok=True)

    def _take_room(self, shard: str, needed_at: int, keep: Collection[str] = ()) -> bool:
        """Evict shards needed later than `needed_at` until the shard fits; its empty `.part` then reserves the room."""
        part, size_bytes = self._part(shard), self._sidecar(shard).bytes
        if size_bytes > self.limit_bytes:
            raise _larger_than_cache(shard, size_bytes, self.limit_bytes)
        part.unlink(missing_ok=True)  # left by a killed process: this one holds the shard's lock
        next_uses = {self._digest(shard): step for shard, step in self._next_uses().items()}
        digests = {self._digest(shard) for shard in keep}
        with alone(self._folder / ROOM_LOCK):
            files = list(files_in(self._folder))
            excess = sum(file.bytes for file in files) + size_bytes - self.limit_bytes
            needed = {file: next_uses.get(file.digest, NEVER) if file.whole else NEVER for file in files}
            later = [file for file in files if needed[file] > needed_at and file.digest not in digests]
            if sum(file.bytes for file in later) < excess:
                return False
            for file in sorted(later, key=lambda file: (-needed[file], file.fetched_ns)):
                if excess <= 0:
                    break
                if self._evict(file):
                    excess -= file.bytes
            if excess > 0:
                return False
            part.touch()
            return True

    def _evict(self, file: CachedFile) -> bool:
        """Delete a shard, or a killed process's part. False when it is in use."""
        lock = file.path if file.whole else self._folder / f"{file.digest}.lock"
        try:
            with alone(lock, wait=False, create=not file.whole) as held:
                if held:
                    file.path.unlink()
                return held
        except FileNotFoundError:  # deleted or completed by another process
            return False

    def _path_of(self, shard: str) -> Path:
        return self._folder / f"{self._digest(shard)}-{self._sidecar(shard).bytes}.whole"

    def _part(self, shard: str) -> Path:
        return self._whole(shard).with_suffix(".part")

    def _lock(self, shard: str) -> Path:
        return self._folder / f"{self._digest(shard)}.lock"

    def _digest_of(self, shard: str) -> str:
        return hashlib.sha256(self._storage.uri(shard).encode()).hexdigest()[:16]


def open_shards(
    *sets: ShardSet,
    cache_gib: float = 0.0,
    set_aside_bytes: int = 0,
    share: float = 1.0,
    in_part: Collection[ShardSet] = (),
) -> list[ShardFiles]:
    """Shards of local folders in place; others through this machine's cache, which the sets `divide`.

    Raises ConfigError when the disk has no room for `cache_gib`, or the cache none for a shard.

    Args:
        cache_gib: size of the cache; 0 takes four fifths of the free disk space, including what is already cached.
        set_aside_bytes: free space that temporary files will need.
        share: part of the cache that these shards may take, where others need some, too.
        in_part: sets of which some shards may not be read, and so may be larger than the cache: see `require_room`.
    """
    # By the URI: prepared data is read through a wrapper of its store.
    remote = [shards for shards in sets if in_bucket(shards.storage.root_uri)]
    if not remote:
        return [ShardsInPlace(shards) for shards in sets]
    root = cache_folder() / CACHE_FOLDER
    for shards in remote:
        with os_errors(f"making {root / shards.kind}"):
            (root / shards.kind).mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(root).free + sum(file.bytes for kind in root.iterdir() for file in files_in(kind))
    if root.stat().st_dev == os.stat(tempfile.gettempdir()).st_dev:
        free_bytes = max(0, free_bytes - set_aside_bytes)
    if int(cache_gib * GIB) > free_bytes:
        raise _larger_than_disk(root, cache_gib, free_bytes)
    room = int(share * (cache_gib * GIB or SHARE_OF_FREE_DISK * free_bytes))
    sizes = [list(shards.sizes().values()) for shards in remote]
    rooms = iter(divide(room, sets=sizes, in_part=[shards in in_part for shards in remote]))
    files: list[ShardFiles] = [
        ShardCache(shards, root / shards.kind, next(rooms)) if shards in remote else ShardsInPlace(shards)
        for shards in sets
    ]
    for cache in files:
        if isinstance(cache, ShardCache) and cache.shards not in in_part:
            cache.require_room(cache.shards.sizes())
    return files


def divide(room: int, sets: Sequence[Sequence[int]], in_part: Sequence[bool]) -> list[int]:
    """Divide `room` among sets of shards, given by their sizes, all in bytes.

    Each set gets room for its largest shard, without which it could not be read, and a part of the rest in proportion
    to its other shards. If the room is too small, sets that are read in part get none for their largest shard. A room
    too small for that is divided in proportion to the largest shards.
    """
    largest, totals = [max(sizes, default=0) for sizes in sets], [sum(sizes) for sizes in sets]
    reserved = largest
    if sum(reserved) > room:
        reserved = [0 if spared else size for spared, size in zip(in_part, largest, strict=True)]
    rest = room - sum(reserved)
    if rest < 0:
        return [room * size // sum(largest) for size in largest]
    others = [total - size for size, total in zip(reserved, totals, strict=True)]
    weights = others if any(others) else totals
    return [size + rest * weight // max(1, sum(weights)) for size, weight in zip(reserved, weights, strict=True)]


def files_in(folder: Path) -> Iterator[CachedFile]:
    """The shards in a cache folder."""
    for path in folder.iterdir():
        if named := FILE.fullmatch(path.name):
            try:
                fetched_ns = path.stat().st_mtime_ns
            except FileNotFoundError:  # evicted or completed since the listing
                continue
            yield CachedFile(path, named[1], int(named[2]), named[3] == "whole", fetched_ns)


@contextmanager
def alone(path: Path, *, wait: bool = True, create: bool = True) -> Iterator[bool]:
    """Hold the exclusive lock of a file during the block. Without `wait`, yields False if the file is locked."""
    handle = open_lock(path, create=create)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        held = True
    except BlockingIOError:
        held = False
    try:
        yield held
    finally:
        _release(handle)


def _release(handle: int) -> None:
    fcntl.flock(handle, fcntl.LOCK_UN)  # a process forked meanwhile has the descriptor, too
    os.close(handle)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


def _larger_than_cache(shard: str, size_bytes: int, limit_bytes: int) -> ConfigError:
    return ConfigError(
        f"shard {shard} has {size_bytes / GIB:.3g} GiB, the cache for shards only {limit_bytes / GIB:.3g} GiB",
        expected="a cache that holds the shards of two groups (data.shuffle_shards), so that each is fetched once",
        fix="raise data.shard_cache_gib, set VLMPIPE_CACHE_DIR to a larger disk, or lower data.shard_samples; training "
        "alone reads samples without the cache by data.shard_reading=ranges",
    )


def _larger_than_disk(folder: Path, cache_gib: float, free_bytes: int) -> ConfigError:
    return ConfigError(
        f"data.shard_cache_gib {cache_gib:g} is more than the {free_bytes / GIB:.3g} GiB that {folder} has room for "
        "beside checkpoints",
        expected="a cache that fits on the disk",
        fix="lower data.shard_cache_gib, or set it to 0: then the cache takes four fifths of what is free; or set "
        "VLMPIPE_CACHE_DIR to a larger disk",
    )
