"""Capabilities of a folder's file system, and fallbacks for missing ones.

Some, above all those of networks and of FUSE, have no fsync of folders, no flock, no hard links, or no change of
times: their errors are in UNSUPPORTED. What a caller promises is kept by other means where there are any:

- No fsync: what was written last may be gone after a power loss.
- No hard links: a rename under a lock, which on one machine promises the same; copies.
- No flock: a lock file that is made exclusively. Another machine's may be taken over once it has not changed for
  LEASE_S, so a process that stopped for longer can act beside its successor.
- No utime: the file system's own clock tells versions apart, for which a replacement waits.

Modes are not changed: a file is made with those that the user's umask leaves.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.trainer.storage.base import TEMPORARY_PREFIX
from vlmpipe.trainer.storage.regular_files import open_lock, read_regular

UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY})
"""How a file system says that it has no such operation. CIFS answers a folder's fsync with EINVAL before Linux 4.17."""
NO_LOCKS = UNSUPPORTED | {errno.ENOLCK}  # of NFS without lockd, and Lustre without -o flock
NO_LINKS = UNSUPPORTED | {errno.EPERM, errno.EMLINK, errno.EXDEV}  # EPERM: link(2) says so of FAT and gcsfuse
NOT_OWNER = UNSUPPORTED | {errno.EPERM}  # utime on a mount that belongs to another user
LEASE_S, POLL_S = 30.0, 0.02  # holders rename a file, which takes milliseconds
LEASE_BYTES = 200
TICK_S = 3.0  # more than the clock of any file system stands still
MOUNTS = Path("/proc/self/mountinfo")


def sync(handle: int) -> None:
    """Make a file's bytes durable, where its file system can."""
    with _allowing(UNSUPPORTED):
        os.fsync(handle)


def sync_folder(folder: Path) -> None:
    """Make a rename or link in the folder durable, where its file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        sync(handle)
    finally:
        os.close(handle)


def set_time(path: str | Path, time_ns: int) -> None:
    """Set the times of access and change, unless the mount decides them."""
    with _allowing(NOT_OWNER):
        os.utime(path, ns=(time_ns, time_ns))


def change_after(handle: int, time_ns: int) -> None:
    """Let an open file's time of change be later than `time_ns`, by the file system's own clock if it is not yet.

    Times that cannot be set come from that clock, which may stand still for milliseconds, on FAT for 2 s. Within such a
    tick the third version of a file may have the inode of the first, and would be taken for it.
    """
    until_s = time.monotonic() + TICK_S
    while os.fstat(handle).st_mtime_ns <= time_ns and time.monotonic() < until_s:
        time.sleep(0.001)
        os.ftruncate(handle, os.fstat(handle).st_size)  # which counts as a change


def move_if_absent(source: str | Path, target: Path) -> None:
    """Give `target` the content of `source`, whole or not at all. Raises FileExistsError where it is there."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with exclusively(target):
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
            os.replace(source, target)


def link_or_copy(source: Path, target: Path) -> None:
    """Link an immutable file under another name, or copy it where there are no hard links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copyfile(source, target)
        with target.open("rb") as copied:
            sync(copied.fileno())


@contextlib.contextmanager
def exclusively(target: Path) -> Iterator[None]:
    """Hold the lock of a name beside it, for as long as a rename takes."""
    place = target.parent / f"{TEMPORARY_PREFIX}lock-{target.name}"
    lock = open_lock(place, 0o666)  # other users who share the folder must be able to lock
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            with _leased(place.with_name(f"{place.name}-lease")):
                yield
        else:
            yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _leased(place: Path) -> Iterator[None]:
    """Hold a lock file that is made exclusively.

    A holder that died is told by its process number on this machine, and on another by a file that is the same for
    LEASE_S seconds of this process: clocks of machines and of file servers differ.
    """
    lease = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex}".encode()
    seen: bytes | None = None  # not empty: so is a file whose holder has not written its name yet
    since_s = 0.0
    while True:
        try:
            handle = os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                holder = read_regular(place, LEASE_BYTES)
                if holder != seen:
                    seen, since_s = holder, time.monotonic()
                if _has_died(holder) or time.monotonic() - since_s > LEASE_S:
                    _take_away(place, holder)
                    continue
            time.sleep(POLL_S)
            continue
        with os.fdopen(handle, "wb") as file:
            file.write(lease)
        break
    try:
        yield
    finally:
        _take_away(place, lease)


def _has_died(holder: bytes) -> bool:
    """Return whether a lock file names a process of this machine that has ended."""
    host, _, rest = holder.decode(errors="replace").partition(" ")
    number = rest.partition(" ")[0]
    if host != socket.gethostname() or not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _take_away(place: Path, content: bytes) -> None:
    """Delete the lock file if it has this content. By a rename, which one of several processes does."""
    aside = place.with_name(f"{place.name}-{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):
        if read_regular(place, LEASE_BYTES) != content:
            return
        os.rename(place, aside)
        if read_regular(aside, LEASE_BYTES) != content:  # another process was faster, and this is the next holder's
            os.rename(aside, place)
            return
        aside.unlink()


@dataclass(frozen=True)
class Limits:
    """Describe what a folder's file system lacks, and what no longer holds there; `kind` is its type, as in cifs."""

    kind: str
    lacks: tuple[str, ...]

    def text(self, folder: str) -> str:
        """One sentence, empty where nothing is missing."""
        if not self.lacks:
            return ""
        return (
            f"the file system of {folder} ({self.kind}) has {', and '.join(self.lacks)}. A local disk, NFS with locks "
            "or a bucket (gs://, s3://) for output.root_uri has all of it"
        )


def limits_of(folder: Path) -> Limits:
    """Try what runs use, in a temporary folder in `folder`. Raises OSError where nothing can be made there."""
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=folder) as name:
        place = Path(name)
        file = place / "file"
        file.write_bytes(b"")
        with file.open("rb+") as opened:

            def sync_all() -> None:
                os.fsync(opened.fileno())
                _fsync_folder(place)

            tried = (
                ("no sync to the disk (what was written last may be gone after a power loss)", UNSUPPORTED, sync_all),
                ("no hard links (copies of a model take room)", NO_LINKS, lambda: os.link(file, place / "link")),
                (
                    "no locks (two machines that write to one run or registry are not kept apart)",
                    NO_LOCKS,
                    lambda: fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB),
                ),
                (
                    "times that cannot be set (replacing a file waits until the clock of the file system advances)",
                    NOT_OWNER,
                    lambda: os.utime(file),
                ),
            )
            lacks = tuple(words for words, errors, action in tried if not _works(action, errors))
    return Limits(_kind_of(folder), lacks)


def _works(action: Callable[[], object], errors: frozenset[int]) -> bool:
    try:
        action()
    except OSError as error:
        if error.errno not in errors:
            raise
        return False
    return True


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _kind_of(folder: Path) -> str:
    """The type of the file system that is mounted at the nearest folder above."""
    real, best, kind = os.path.realpath(folder), "", "of an unknown type"
    with contextlib.suppress(OSError):
        for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            place = before.split(" ")[4].replace("\\040", " ")
            inside = real == place or real.startswith(place.rstrip("/") + "/")
            if inside and len(place) >= len(best):
                best, kind = place, after.split(" ")[0]
    return kind


@contextlib.contextmanager
def _allowing(errors: frozenset[int]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in errors:
            raise
