"""Part `checkpoint-ranks`: requests and bytes of checkpoints of up to 1,024 ranks, simulated in one process.

The commit protocol, retention and each rank's plan of a resume are the trainer's own, called for one rank after another
against a bucket in memory that counts. No rank trains: a tensor has a few rows of each rank.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest import mock

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from benchmarks.checkpoint.stacked_layers import RECORD
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.trainer.checkpoint import commit, retention, verified_files
from vlmpipe.trainer.checkpoint.attempts import claim_attempt
from vlmpipe.trainer.checkpoint.commit import Listing, checkpoint_name, opened, upload_files
from vlmpipe.trainer.checkpoint.retention import Housekeeping, Retention
from vlmpipe.trainer.checkpoint.verified_files import CheckpointFiles, Ranges, total_bytes, union
from vlmpipe.trainer.storage.base import AlreadyExistsError, ObjectInfo, Storage, VersionConflictError, crc32c_of
from vlmpipe.trainer.storage.bucket import no_such_object
from vlmpipe.trainer.strategies.named_checkpoint import METADATA_FILE, metadata_of, ranges_of
from vlmpipe.trainer.strategies.tensor_pieces import TensorPieces

Item = TypeVar("Item")
Result = TypeVar("Result")
NODE_RANKS = 8
PAGE = 1000  # objects or folders of one listing request
ROWS, ROW_BYTES = 4096, 16  # of a tensor
STATES = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
KEEP = 1
ITEM = b"\1" * ROW_BYTES


@dataclass
class Requests:
    """Requests by kind, bytes that were read, and how many requests had to wait for one another."""

    kinds: Counter[str] = field(default_factory=Counter)
    read_bytes: int = 0
    depth: int = 0

    @property
    def total(self) -> int:
        return self.kinds.total()


class CountingBucket:
    """A bucket in memory. `counted` has what was asked since the last `take`."""

    root_uri = "memory://bucket"

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}  # content and generation
        self.counted = Requests()
        self._generation = 0

    def take(self) -> Requests:
        """What was asked since the last call."""
        counted, self.counted = self.counted, Requests()
        return counted

    def uri(self, name: str) -> str:
        return f"{self.root_uri}/{name}"

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        names = sorted(name for name in self.objects if name.startswith(f"{prefix}/"))
        self._pages("list", len(names))
        return [self._info(name) for name in names]

    def folders(self, prefix: str) -> Sequence[str]:
        below = {name.removeprefix(f"{prefix}/") for name in self.objects if name.startswith(f"{prefix}/")}
        folders = sorted({name.partition("/")[0] for name in below if "/" in name})
        self._pages("list", len(folders))
        return folders

    def stat(self, name: str) -> ObjectInfo | None:
        self._count("stat")
        return self._info(name) if name in self.objects else None

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        return self.read_range(name, 0, 1 << 62)

    def read_range(self, name: str, start: int, end: int, *, version: str = "") -> bytes:
        self._count("read")
        if name not in self.objects:
            raise no_such_object(self.uri(name))
        data = self.objects[name][0][start:end]
        self.counted.read_bytes += len(data)
        return data

    def write(self, name: str, data: bytes) -> None:
        self._count("write")
        self._generation += 1
        self.objects[name] = data, self._generation

    def create(self, name: str, data: bytes) -> None:
        if name in self.objects:
            raise AlreadyExistsError(self.uri(name))
        self.write(name, data)

    def replace(self, name: str, data: bytes, expected_version: str) -> None:
        if expected_version != (str(self.objects[name][1]) if name in self.objects else ""):
            raise VersionConflictError(self.uri(name))
        self.write(name, data)

    def upload(self, path: Path, name: str, *, crc32c: int | None = None) -> None:
        self.write(name, path.read_bytes())

    def delete(self, name: str) -> None:
        self._count("delete")
        self.objects.pop(name, None)

    def delete_folder(self, prefix: str) -> None:
        for info in self.list(prefix):
            self.delete(info.name)

    def in_parallel(self, function: Callable[[Item], Result], items: Iterable[Item], **_: object) -> Iterator[Result]:
        """The trainer's `in_parallel`, one after the other: requests of different items do not wait for one another."""
        began, deepest = self.counted.depth, self.counted.depth
        results = []
        for item in items:
            self.counted.depth = began
            results.append(function(item))
            deepest = max(deepest, self.counted.depth)
        self.counted.depth = deepest
        return iter(results)

    def _pages(self, kind: str, entries: int) -> None:
        for _ in range(max(1, -(-entries // PAGE))):
            self._count(kind)

    def _count(self, kind: str) -> None:
        self.counted.kinds[kind] += 1
        self.counted.depth += 1

    def _info(self, name: str) -> ObjectInfo:
        data, generation = self.objects[name]
        return ObjectInfo(name, len(data), str(generation), crc32c_of(data))


@dataclass(frozen=True)
class Simulation:
    """A run whose checkpoints are saved by `ranks` ranks, eight of a node; `tensors` parameters of ROWS rows each."""

    bucket: CountingBucket
    scratch: Path
    ranks: int
    tensors: int = 4

    @classmethod
    @contextlib.contextmanager
    def of(cls, scratch: Path, ranks: int, tensors: int = 4) -> Iterator[Simulation]:
        bucket = CountingBucket()
        with contextlib.ExitStack() as patched:
            for module in (commit, retention, verified_files):
                patched.enter_context(mock.patch.object(module, "in_parallel", bucket.in_parallel))
            run = cls(bucket, scratch, ranks, tensors)
            claim_attempt(run.store, fresh=False)
            yield run

    @property
    def store(self) -> Storage:
        return cast(Storage, self.bucket)  # without what a simulation asks nothing of

    @property
    def nodes(self) -> int:
        return max(1, self.ranks // NODE_RANKS)

    @property
    def rank_bytes(self) -> int:
        """Of a rank's own part of the state."""
        return self.tensors * len(STATES) * ROWS // self.ranks * ROW_BYTES

    def save(self, step: int) -> tuple[Requests, Requests, Requests]:
        """Save and clear up. Returns the requests of all nodes' files, of COMMIT, and of LATEST and retention."""
        store, name = self.store, checkpoint_name(1, step, "a")
        part, state, described = (self.scratch / file for file in ("part", "random", "metadata"))
        part.write_bytes(ITEM * (self.rank_bytes // ROW_BYTES))
        state.write_bytes(bytes(5056))  # of torch's generator of a CPU
        described.write_bytes(pickle.dumps(self.metadata()))
        per_node = self.ranks // self.nodes
        self.bucket.take()
        for node in range(self.nodes):
            ranks = range(node * per_node, (node + 1) * per_node)
            files = {f"__{rank}_0.distcp": part for rank in ranks} | {f"rng-{rank}.pt": state for rank in ranks}
            upload_files(store, name, node, files | ({METADATA_FILE: described} if node == 0 else {}), ranks=self.ranks)
        uploads = self.bucket.take()
        record = {**vars(RECORD), "step": step, "world_size": self.ranks, "num_nodes": self.nodes}
        commit.commit(store, name, type(RECORD)(**record))
        committed = self.bucket.take()
        commit.name_newest(store, name)
        Housekeeping(store, Retention(KEEP)).after_commit(name)
        return uploads, committed, self.bucket.take()

    def find(self) -> tuple[CheckpointFiles, Requests]:
        """What rank 0 of a resume asks before any rank reads a file."""
        self.bucket.take()
        listing = Listing.read(self.store)
        name = listing.committed[-1]
        _, files = opened(self.store, name, listing)
        return CheckpointFiles(self.store, name, files), self.bucket.take()

    def described(self, files: CheckpointFiles) -> tuple[Metadata, Requests]:
        """What a node fetches before its ranks plan."""
        self.bucket.take()
        metadata = metadata_of(files)
        return metadata, self.bucket.take()

    def reads(self, files: CheckpointFiles, metadata: Metadata, ranks: int, rank: int) -> Ranges:
        """What one of `ranks` ranks of a resume reads beside the metadata, as it tells the others."""
        read = ranges_of(self.target(ranks, rank), metadata, files)
        own = f"rng-{rank}.pt"
        own_state = {own: [(0, files.sizes_bytes[own])]} if own in files.sizes_bytes and ranks == self.ranks else {}
        return union([{file: ranges for file, ranges in read.items() if file != METADATA_FILE}, own_state])

    def fetch(self, files: CheckpointFiles, ranges: Ranges) -> Requests:
        """Read and verify ranges, as the ranks of a node do together."""
        self.bucket.take()
        files.verify(ranges)
        return self.bucket.take()

    def metadata(self) -> Metadata:
        """What torch's writer would say of these files."""
        rows, columns, item_bytes = ROWS // self.ranks, ROW_BYTES // 4, ROWS // self.ranks * ROW_BYTES
        tensors: dict[str, Any] = {}
        places = {}
        for number, name in enumerate(self._names()):
            offsets = [torch.Size([rank * rows, 0]) for rank in range(self.ranks)]
            chunks = [ChunkStorageMetadata(offset, torch.Size([rows, columns])) for offset in offsets]
            tensors[name] = TensorStorageMetadata(TensorProperties(), torch.Size([ROWS, columns]), chunks)
            for rank, offset in enumerate(offsets):
                place = _StorageInfo(f"__{rank}_0.distcp", number * item_bytes, item_bytes)
                places[MetadataIndex(name, offset, rank)] = place
        return Metadata(tensors, {}, places)

    def target(self, ranks: int, rank: int) -> dict[str, object]:
        """Tensors that one of `ranks` ranks loads."""
        rows = ROWS // ranks
        local = torch.zeros(rows, ROW_BYTES // 4)
        pieces = {torch.Size([rank * rows, 0]): local}
        state: dict[str, dict[str, torch.Tensor]] = {}
        for name in self._names():
            part, rest = name.split(".", 1)
            state.setdefault(part, {})[rest] = TensorPieces(torch.Size([ROWS, ROW_BYTES // 4]), local, pieces)
        return dict(state)

    def _names(self) -> Iterator[str]:
        return (f"{state}.layers.{number}.weight" for number in range(self.tensors) for state in STATES)


def checkpoint_ranks(bench: Bench) -> None:
    """Saves of 8, 64 and 1,024 ranks, and resumes on as many and on half as many."""
    for ranks in (8, 64) if bench.quick else (8, 64, 1024):
        with Simulation.of(bench.scratch, ranks) as run:
            for step in range(1, KEEP + 2):
                uploads, committed, cleared = run.save(step)
            files, asked = run.find()
            metadata, described = run.described(files)
            rows: dict[str, tuple[str, float]] = {
                "save: all nodes": ("requests", uploads.total),
                "COMMIT: rank 0": ("requests", committed.total),
                "COMMIT: one after the other": ("requests", committed.depth),
                "LATEST and retention: rank 0": ("requests", cleared.total),
                "resume: rank 0": ("requests", asked.total),
                "resume: one after the other": ("requests", asked.depth),
                "resume: COMMITs and manifests": ("KiB", asked.read_bytes / 1024),
                "resume: metadata, each node": ("KiB", described.read_bytes / 1024),
            }
            for resumed in (ranks, ranks // 2):
                parts = [run.reads(files, metadata, resumed, rank) for rank in range(resumed)]
                nodes = [union(parts[first : first + NODE_RANKS]) for first in range(0, resumed, NODE_RANKS)]
                fetched = [run.fetch(files, ranges) for ranges in nodes]
                kind = f"resume on {resumed:,}"
                rows[f"{kind}: the busiest node"] = ("requests", max(one.total for one in fetched))
                read, loaded = sum(one.read_bytes for one in fetched), total_bytes(union(parts))
                rows[f"{kind}: read for each byte that is loaded"] = ("bytes", read / loaded)
                rows[f"{kind}: a rank to all others"] = ("bytes", max(len(pickle.dumps(part)) for part in parts))
            for claim, (unit, value) in rows.items():
                bench.report.figure(claim, f"saved by {ranks:,} ranks", unit, Side("simulated", [value]))
