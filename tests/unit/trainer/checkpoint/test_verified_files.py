"""Ranges of a checkpoint's files: exactly the bytes that were saved, or an error; and no other byte matters."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.gcs.server import FakeGcs, Fault
from tests.support.gcs import QUICK_RETRY
from vlmpipe.trainer.checkpoint import verified_files
from vlmpipe.trainer.checkpoint.manifest import (
    MAX_BLOCKS,
    MIN_BLOCK_BYTES,
    DamagedError,
    FileSums,
    block_bytes_of,
    manifest_bytes,
    read_manifest,
    sums_of_file,
)
from vlmpipe.trainer.checkpoint.verified_files import CheckpointFiles, merged, union
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.gcs import GcsStorage
from vlmpipe.trainer.storage.local import LocalStorage

SIZE = 10_000  # nine blocks and a part of one
DATA = bytes(place * place % 251 for place in range(SIZE))
PLACE = "checkpoints/name/shard"
RANGES = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(lambda ends: (min(ends), max(ends)))


@pytest.fixture
def tmp_path(memory: Path) -> Path:
    return memory


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified_files, "PIECE_BYTES", 3 * MIN_BLOCK_BYTES)


def files_in(store: Storage, tmp_path: Path, *, signed: bool = False) -> CheckpointFiles:
    (tmp_path / "shard").write_bytes(DATA)
    store.write(PLACE, DATA)
    sums = {"shard": sums_of_file(tmp_path / "shard", with_sha256=signed)}
    return CheckpointFiles(store, "name", read_manifest(manifest_bytes(sums, "name/node-0.json"), "node-0.json"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(ranges=st.lists(RANGES, min_size=1, max_size=6))
def test_ranges_are_those_of_the_file(ranges: list[tuple[int, int]], tmp_path: Path) -> None:
    files = files_in(LocalStorage(tmp_path / "store"), tmp_path)
    read = files.read_all([("shard", *ends) for ends in ranges])
    assert [bytes(data) for data in read] == [DATA[slice(*ends)] for ends in ranges]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(ends=RANGES, bit=st.integers(0, 8 * SIZE - 1), signed=st.booleans())
def test_a_flipped_bit_is_found_where_it_is_read_and_does_not_matter_elsewhere(
    ends: tuple[int, int], bit: int, signed: bool, tmp_path: Path
) -> None:
    store = LocalStorage(tmp_path / "store")
    files = files_in(store, tmp_path, signed=signed)
    store.write(PLACE, DATA[: bit // 8] + bytes([DATA[bit // 8] ^ 1 << bit % 8]) + DATA[bit // 8 + 1 :])
    start, end = ends
    first, last = start - start % MIN_BLOCK_BYTES, -(-end // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    if start < end and first <= bit // 8 < last:  # whole blocks are verified
        with pytest.raises(DamagedError, match=f"shard differs from its {'SHA-256' if signed else 'CRC32C'}"):
            files.read("shard", start, end)
    else:
        assert bytes(files.read("shard", start, end)) == DATA[start:end]


@pytest.mark.parametrize("size", [0, 1, 5000, SIZE - 1])
def test_a_file_that_was_cut_is_found_by_what_it_lacks(size: int, tmp_path: Path) -> None:
    store = LocalStorage(tmp_path / "store")
    files = files_in(store, tmp_path)
    store.write(PLACE, DATA[:size])
    with pytest.raises(DamagedError, match="shard ends before byte 10,000"):
        files.read("shard", SIZE - 10)
    store.delete(PLACE)
    with pytest.raises(DamagedError, match="shard is missing"):
        files.read("shard")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    with FakeGcs(buckets=["bucket"]) as server:
        yield server


@pytest.fixture
def bucket(server: FakeGcs) -> GcsStorage:
    return GcsStorage("gs://bucket/run", client=server.client(), retry=QUICK_RETRY)


def test_a_range_that_arrives_damaged_is_read_again(bucket: GcsStorage, server: FakeGcs, tmp_path: Path) -> None:
    files = files_in(bucket, tmp_path)
    server.faults.append(Fault("corrupt", path="/download/", times=2))
    assert bytes(files.read("shard", 100, 200)) == DATA[100:200]
    assert server.downloads == [("run/" + PLACE, 1024)] * 3, "one block, and nothing beside it"
    server.faults.append(Fault("corrupt", path="/download/", times=9))
    with pytest.raises(DamagedError, match="differs from its CRC32C"):
        files.read("shard", 100, 200)


def test_a_folder_gets_the_ranges_and_nothing_else(bucket: GcsStorage, server: FakeGcs, tmp_path: Path) -> None:
    """Two processes share the work; each byte is fetched once."""
    files, folder = files_in(bucket, tmp_path), tmp_path / "folder"
    wanted = union([{"shard": [(1024, 2000), (5000, 9000)]}, {"shard": [(1500, 2048), (4096, 5000)]}])
    assert wanted == {"shard": [(1024, 2048), (4096, 9000)]}
    files.lay_out(folder, wanted)
    for share in range(2):
        files.fill(folder, wanted, share=share, shares=2)
    found = (folder / "shard").read_bytes()
    assert found == bytes(1024) + DATA[1024:2048] + bytes(2048) + DATA[4096:9000] + bytes(1000)
    assert sum(size for _, size in server.downloads) == 1024 + 5120, "whole blocks"
    assert not (tmp_path / "cache").exists()


def test_a_file_that_nobody_reads_is_empty(bucket: GcsStorage, server: FakeGcs, tmp_path: Path) -> None:
    files, folder = files_in(bucket, tmp_path), tmp_path / "folder"
    files.lay_out(folder, {})
    files.fill(folder, {})
    assert (folder / "shard").read_bytes() == b"" and not server.downloads


def test_files_of_a_folder_are_linked_and_verified(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path / "store")
    files, folder = files_in(store, tmp_path), tmp_path / "folder"
    files.lay_out(folder, files.whole())
    store.write(PLACE, bytes([DATA[0] ^ 1]) + DATA[1:])
    files.fill(folder, {"shard": [(2000, SIZE)]})
    with pytest.raises(DamagedError):
        files.fill(folder, files.whole())


@settings(max_examples=60)
@given(ranges=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).filter(lambda ends: ends[0] < ends[1])))
def test_merged_ranges_hold_the_same_bytes_once(ranges: list[tuple[int, int]]) -> None:
    found = merged(ranges)
    bytes_of = [place for start, end in found for place in range(start, end)]
    assert bytes_of == sorted({place for start, end in ranges for place in range(start, end)})
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(found)), "none touch"


@pytest.mark.parametrize("size", [0, 1, 1024, 1025, 32 << 20, (32 << 20) + 1, 81 * 10**9, 10**13])
def test_blocks_are_small_and_few(size: int) -> None:
    block = block_bytes_of(size)
    assert -(-size // block) <= MAX_BLOCKS and block % MIN_BLOCK_BYTES == 0
    assert block <= max(MIN_BLOCK_BYTES, size // MAX_BLOCKS + MIN_BLOCK_BYTES)


def test_a_manifest_with_too_few_digests_is_damaged() -> None:
    text = manifest_bytes({"shard": FileSums(SIZE, 1, 1024, bytes(9 * 4))}, "name/node-0.json")
    with pytest.raises(DamagedError, match="not one digest for each of the 10 blocks of 'shard'"):
        read_manifest(text, "node-0.json")


@pytest.mark.parametrize(
    "entry",
    [
        [], {}, {"bytes": "1", "crc32c": 1, "block_bytes": 1024, "blocks_crc32c": "AAAAAA=="},
        {"bytes": 1, "crc32c": 1, "block_bytes": 0, "blocks_crc32c": "AAAAAA=="},
        {"bytes": 1, "crc32c": 1, "block_bytes": 1024},
        {"bytes": 1, "crc32c": 1, "block_bytes": 1024, "blocks_crc32c": "A"},
    ],
)  # fmt: skip
def test_a_manifest_of_another_form_is_damaged(entry: object) -> None:
    with pytest.raises(DamagedError, match=r"node-0\.json is not what this program writes"):
        read_manifest(json.dumps({"shard": entry}).encode(), "node-0.json")
