"""Verified bytes of a checkpoint's files: whole or by range, in memory or in a folder.

Ranges are read as whole blocks, whose digests are in the manifests (`vlmpipe.trainer.checkpoint.manifest`). So only
what is read is verified, and nothing is returned or written that was not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from vlmpipe.trainer.checkpoint.commit import FOLDER, Checkpoint, Listing, damage_of, files_of, inspect
from vlmpipe.trainer.checkpoint.manifest import DamagedError, Files
from vlmpipe.trainer.errors import UserError, os_errors
from vlmpipe.trainer.sizing.export_size import IN_FLIGHT_BYTES
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.bucket import TRANSFER_ATTEMPTS
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.transfer import in_parallel

THREADS = 8  # requests under way, of a process
PIECE_BYTES = 16 << 20  # of one request

Range = tuple[int, int]  # first byte, and the one after the last
Ranges = Mapping[str, Sequence[Range]]  # by file
Piece = tuple[str, int, int]  # file and range


class CheckpointFiles:
    """The files of one committed checkpoint. Methods raise DamagedError for bytes that are not those that were saved.

    A transfer that arrives damaged is tried again.
    """

    def __init__(self, store: Storage, name: str, files: Files) -> None:
        self.name = name
        self._store, self._files = store, files

    @classmethod
    def of(cls, store: Storage, checkpoint: Checkpoint) -> CheckpointFiles:
        """Reads the manifests that COMMIT lists."""
        return cls(store, checkpoint.name, files_of(store, checkpoint))

    @property
    def sizes_bytes(self) -> dict[str, int]:
        return {file: sums.size_bytes for file, sums in self._files.items()}

    def whole(self, files: Iterable[str] | None = None) -> dict[str, list[Range]]:
        """Ranges of whole files; None for all."""
        chosen = self._files if files is None else files
        return {file: [(0, self._files[file].size_bytes)] for file in chosen}

    def read(self, file: str, start: int = 0, end: int | None = None) -> memoryview:
        """Bytes `start` to `end` of a file."""
        return next(self.read_all([(file, start, self._files[file].size_bytes if end is None else end)]))

    def read_all(self, requested: Sequence[Piece]) -> Iterator[memoryview]:
        """Several ranges, in their order, transferred in parallel: one of them and `IN_FLIGHT_BYTES` are in memory."""
        pieces = [list(self._pieces(*piece)) for piece in requested]
        arriving = self._transfer([part for parts in pieces for part in parts])
        for parts, (_, start, end) in zip(pieces, requested, strict=True):
            if len(parts) == 1:
                yield next(arriving)
                continue
            data, at = bytearray(end - start), 0
            for _ in parts:
                arrived = next(arriving)
                data[at : at + len(arrived)] = arrived
                at += len(arrived)
            yield memoryview(data)

    def verify(self, ranges: Ranges) -> None:
        """Read these ranges, and keep nothing."""
        for _ in self._transfer(self._split(ranges)):
            pass

    def lay_out(self, folder: Path, ranges: Ranges, *, links: bool = True) -> None:
        """Make `folder`, with a file for each of the checkpoint's, for `fill` to write these ranges to.

        Files without a range are empty, and cannot be mistaken for a checkpoint's. `links` allows links to the files
        of a store in a folder, which `fill` then only verifies. Laid out again for more ranges, files keep their bytes.
        """
        for file, sums in self._files.items():
            target = folder / file
            with os_errors(f"writing {target}"):
                target.parent.mkdir(parents=True, exist_ok=True)
                if target.is_symlink():
                    continue
                if links and isinstance(self._store, LocalStorage):
                    target.symlink_to(self._local(self._store, file))
                    continue
                with target.open("ab") as sink:
                    sink.truncate(sums.size_bytes if ranges.get(file) else 0)

    def fill(self, folder: Path, ranges: Ranges, *, share: int = 0, shares: int = 1) -> None:
        """Write share `share` of `shares` of these ranges to their places in a folder that `lay_out` has made."""
        pieces = self._split(ranges)[share::shares]
        for (file, start, _), data in zip(pieces, self._transfer(pieces), strict=True):
            if not (folder / file).is_symlink():
                with os_errors(f"writing {folder / file}"):
                    _write_at(folder / file, start, data)

    def _local(self, store: LocalStorage, file: str) -> Path:
        try:
            return store.fetch(f"{FOLDER}/{self.name}/{file}").resolve()
        except UserError as error:
            raise damage_of(self._store, self.name, file, error) from error

    def _split(self, ranges: Ranges) -> list[Piece]:
        return [
            piece
            for file, spans in ranges.items()
            for start, end in merged(spans)
            for piece in self._pieces(file, start, end)
            if start < end
        ]

    def _pieces(self, file: str, start: int, end: int) -> Iterator[Piece]:
        """At least one, cut between blocks so that none is read twice."""
        block_bytes = self._files[file].block_bytes
        size = max(1, PIECE_BYTES // block_bytes) * block_bytes
        while True:
            stop = min(end, (start // size + 1) * size)
            yield file, start, stop
            start = stop
            if start >= end:
                return

    def _transfer(self, pieces: Sequence[Piece]) -> Iterator[memoryview]:
        return in_parallel(
            self._piece,
            pieces,
            threads=min(THREADS, max(1, len(pieces))),
            weigh=lambda piece: piece[2] - piece[1],
            max_bytes=IN_FLIGHT_BYTES,
        )

    def _piece(self, piece: Piece) -> memoryview:
        file, start, end = piece
        sums = self._files[file]
        first, last = sums.around(start, end) if start < end else (start, start)
        for _ in range(TRANSFER_ATTEMPTS):
            try:
                data = memoryview(self._store.read_range(f"{FOLDER}/{self.name}/{file}", first, last))
            except UserError as error:
                raise damage_of(self._store, self.name, file, error) from error
            if len(data) == last - first and sums.holds(first, data):
                return data[start - first : end - first]
        if len(data) < last - first:
            raise DamagedError(f"{self.name}: {file} ends before byte {last:,}")
        raise DamagedError(f"{self.name}: {file} differs from its {sums.digest_name}")


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Merge the ranges into ascending ones that neither overlap nor touch."""
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def total_bytes(ranges: Ranges) -> int:
    """Size of ranges that do not overlap."""
    return sum(end - start for of_file in ranges.values() for start, end in of_file)


def union(several: Iterable[Ranges]) -> dict[str, list[Range]]:
    """All of these ranges together."""
    joined: dict[str, list[Range]] = {}
    for ranges in several:
        for file, of_file in ranges.items():
            joined.setdefault(file, []).extend(of_file)
    return {file: merged(of_file) for file, of_file in joined.items()}


def fetch_folder(store: Storage, checkpoint: Checkpoint, scratch: Path, *, links: bool = True) -> Path:
    """A local folder, below `scratch`, of all the checkpoint's files, verified. Raises DamagedError for a wrong one.

    links: see `CheckpointFiles.lay_out`; without them the files are the caller's own.
    """
    files, folder = CheckpointFiles.of(store, checkpoint), scratch / checkpoint.name
    files.lay_out(folder, files.whole(), links=links)
    files.fill(folder, files.whole())
    return folder


def verify(store: Storage, name: str, *, key: bytes = b"") -> Checkpoint:
    """Check COMMIT, manifests, and every byte of every file. Raises DamagedError with the first fault."""
    checkpoint, sums = inspect(store, name, Listing.read(store), key=key)
    files = CheckpointFiles(store, name, sums)
    files.verify(files.whole())
    return checkpoint


def _write_at(path: Path, start: int, data: memoryview) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        while data:
            written = os.pwrite(handle, data, start)
            data, start = data[written:], start + written
    finally:
        os.close(handle)
