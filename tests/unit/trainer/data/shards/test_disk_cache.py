"""Shards of a remote store: fetched once, never more than fits, never one that is damaged."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.data.shard_splits import sequence_of, split_of
from vlmpipe.trainer.data.prefetch import GROUPS_AHEAD, Needs, ShardPrefetcher, ShardSchedule
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards import disk_cache as shard_cache
from vlmpipe.trainer.data.shards.disk_cache import (
    GIB,
    NEVER,
    PrefetchResult,
    ShardCache,
    divide,
    files_in,
    open_shards,
)
from vlmpipe.trainer.data.shards.tar import Members, ShardReader, ShardWriter, sample_json
from vlmpipe.trainer.data.shards.verified_files import DataShards, ShardsInPlace
from vlmpipe.trainer.errors import ConfigError, DataError, UserError
from vlmpipe.trainer.storage.local import LocalStorage

SHARDS, SHARD_SAMPLES = 24, 10
TURNS = (Turn("what?", "é 7", "all"),)


class Remote(LocalStorage):
    """A folder that stands for a bucket. Counts downloads; `spoil` may change what arrives, or raise."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.downloads: list[str] = []
        self.spoil: Callable[[str, Path], None] = lambda name, path: None
        self.cache, self.max_cached_bytes = root.parent / "cache", 0
        self.changed = threading.Condition()

    def download(self, name: str, path: Path) -> None:
        super().download(name, path)
        self.spoil(name, path)
        with self.changed:
            self.downloads.append(name)
            cached = {file.digest: file.bytes for file in files_in(self.cache)}  # a listing may show both names of one
            self.max_cached_bytes = max(self.max_cached_bytes, sum(cached.values()))
            self.changed.notify_all()

    def wait_for(self, downloads: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.downloads) >= downloads, timeout=20), self.downloads


class Fixture:
    """Shards of equal size in a remote store, and caches with room for so many of them."""

    def __init__(self, folder: Path) -> None:
        writer = ShardWriter(folder / "prepared", "train", SHARD_SAMPLES)
        self.members: list[Members] = []
        for number in range(SHARDS * SHARD_SAMPLES):
            key = f"sample-{number:04d}"
            self.members.append(writer.add(key, sample_json(key, TURNS), [("png", b"image %04d" % number)]))
        writer.close()
        self.remote = Remote(folder / "prepared")
        self.shards = sorted({members.shard for members in self.members})
        self.shard_bytes = Path(self.remote.uri(self.shards[0])).stat().st_size

    def cache(self, shards: int) -> ShardCache:
        """As another process has it, too: all that they share is the folder."""
        self.remote.cache.mkdir(exist_ok=True)
        return ShardCache(DataShards(self.remote), self.remote.cache, shards * self.shard_bytes)

    def cached(self) -> list[Path]:
        return sorted(self.remote.cache.glob("*.whole"))

    def read(self, cache: ShardCache, shard: str) -> None:
        members = next(members for members in self.members if members.shard == shard)
        assert ShardReader(cache).turns(members) == TURNS

    def split(self) -> Any:
        return split_of([number // SHARD_SAMPLES for number in range(len(self.members))], self.shards)


def schedule_of(split: Any, sequence: PackedBatchSampler, end_step: int) -> ShardSchedule:
    return ShardSchedule(split.shards, Needs.one_each(split.shard_numbers), sequence, end_step)


@pytest.fixture
def data(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path)


def walk(data: Fixture, cache: ShardCache, *, shuffle_shards: int, epochs: int = 3, threads: bool = False) -> int:
    """Read all samples in the order of the plan. Returns the steps."""
    split = data.split()
    sequence, reader = sequence_of(split, shuffle_shards), ShardReader(cache)
    steps = sequence.num_steps(epochs)
    schedule = schedule_of(split, sequence, steps)
    step = 0
    ahead = ShardPrefetcher(cache, schedule, group_shards=shuffle_shards) if threads else None
    if not threads:
        cache.expect(lambda: dict(zip(schedule.shards, schedule.next_uses(step).tolist(), strict=True)))
    with closing(ahead) if ahead else nullcontext():
        for step in range(steps):
            if ahead:
                ahead.advance(step)
            for number in sequence.members(sequence.batch(step)).tolist():
                assert reader.images(data.members[number]) == [b"image %04d" % number]
    return steps


def walk_together(data: Fixture, caches: list[ShardCache], *, threads: bool = False) -> None:
    """Walk one epoch through each of the caches at the same time, as the processes of a machine do."""
    start = threading.Barrier(len(caches))

    def process(cache: ShardCache) -> None:
        start.wait()
        walk(data, cache, shuffle_shards=4, epochs=1, threads=threads)

    with ThreadPoolExecutor(len(caches)) as pool:
        for walked in [pool.submit(process, cache) for cache in caches]:
            walked.result()


def test_an_epoch_fetches_each_shard_about_once_whatever_the_cache_holds(data: Fixture) -> None:
    walk(data, data.cache(8), shuffle_shards=4)
    fetched = Counter(data.remote.downloads)
    assert set(fetched) == set(data.shards)
    assert sum(fetched.values()) <= 1.1 * 3 * SHARDS
    assert data.remote.max_cached_bytes <= 8 * data.shard_bytes


def test_without_locality_the_same_cache_fetches_many_times_more(data: Fixture) -> None:
    walk(data, data.cache(8), shuffle_shards=SHARDS, epochs=1)
    assert len(data.remote.downloads) > 3 * SHARDS


@pytest.mark.parametrize("room", [6, 8])
def test_threads_that_fetch_ahead_fetch_no_shard_more_often(data: Fixture, room: int) -> None:
    walk(data, data.cache(room), shuffle_shards=4, threads=True)
    assert len(data.remote.downloads) <= 1.25 * 3 * SHARDS
    assert data.remote.max_cached_bytes <= room * data.shard_bytes


def test_large_cache_fetches_each_shard_once(data: Fixture) -> None:
    walk(data, data.cache(SHARDS), shuffle_shards=4, threads=True)
    assert sorted(data.remote.downloads) == data.shards


def test_shards_come_in_the_order_of_the_plan_and_two_groups_ahead(data: Fixture) -> None:
    split, shuffle_shards = data.split(), 4
    sequence = sequence_of(split, shuffle_shards)
    schedule = schedule_of(split, sequence, sequence.num_steps(1))
    ahead = ShardPrefetcher(data.cache(SHARDS), schedule, group_shards=shuffle_shards)
    order = [schedule.shards[number] for number in np.argsort(schedule.next_uses(0), kind="stable")]
    ahead.advance(0)
    wanted = GROUPS_AHEAD * shuffle_shards
    data.remote.wait_for(wanted)
    ahead.close()
    assert set(data.remote.downloads) == set(order[:wanted])
    assert set(data.remote.downloads[:2]) <= set(order[:3])  # two threads: the first ones may swap


def test_processes_of_one_machine_fetch_each_shard_once_between_them(data: Fixture) -> None:
    caches = [data.cache(SHARDS) for _ in range(4)]
    walk_together(data, caches, threads=True)
    assert sorted(data.remote.downloads) == data.shards


def test_processes_sharing_a_too_small_cache_make_progress(data: Fixture) -> None:
    caches = [data.cache(2) for _ in range(3)]
    walk_together(data, caches)
    assert data.remote.max_cached_bytes <= 2 * data.shard_bytes


def test_shards_in_use_are_not_evicted(data: Fixture) -> None:
    cache, (first, second) = data.cache(1), data.shards[:2]
    came = threading.Event()

    def read() -> None:
        data.read(cache, second)
        came.set()

    with cache.opened(first):
        reader = threading.Thread(target=read)
        reader.start()
        assert cache.fetch_ahead(data.shards[2], needed_at=1) is PrefetchResult.NO_ROOM
        assert not came.is_set() and len(data.cached()) == 1
    reader.join(timeout=20)
    assert came.is_set() and data.remote.downloads == [first, second]


def test_shards_needed_last_are_evicted_first(data: Fixture) -> None:
    cache, (one, two, three, four) = data.cache(3), data.shards[:4]
    cache.expect(lambda: {one: 5, two: 9, three: 7, four: 8})
    for shard in (one, two, three):
        data.read(cache, shard)
    assert cache.fetch_ahead(four, needed_at=8) is PrefetchResult.FETCHED  # in place of `two`
    assert cache.fetch_ahead(two, needed_at=9) is PrefetchResult.NO_ROOM  # all that is there is needed sooner
    for shard in (one, three, four):
        data.read(cache, shard)
    assert data.remote.downloads == [one, two, three, four]
    assert (
        cache.fetch_ahead(two, needed_at=6, keep={three, four}) is PrefetchResult.NO_ROOM
    )  # needed later, and still kept
    assert cache.fetch_ahead(two, needed_at=6, keep={four}) is PrefetchResult.FETCHED


def test_unscheduled_shards_are_evicted_first(data: Fixture) -> None:
    """Such as the shards of an earlier run's data."""
    data.read(data.cache(2), data.shards[5])
    cache = data.cache(2)
    cache.expect(lambda: {data.shards[0]: 1, data.shards[1]: NEVER - 1})
    data.read(cache, data.shards[0])
    assert cache.fetch_ahead(data.shards[1], needed_at=NEVER - 1) is PrefetchResult.FETCHED
    assert cache.fetch_ahead(data.shards[0], needed_at=1) is PrefetchResult.THERE


def test_leftovers_of_killed_processes_are_evicted(data: Fixture) -> None:
    data.read(data.cache(1), data.shards[0])
    (whole,) = data.cached()
    part = whole.with_suffix(".part")
    whole.rename(part)
    cache = data.cache(1)
    data.read(cache, data.shards[1])
    assert not part.exists()
    data.cached()[0].rename(part.with_name(data.cached()[0].name).with_suffix(".part"))
    data.read(cache, data.shards[1])  # its own leavings neither
    assert list(data.remote.cache.glob("*.part")) == []


def flip(name: str, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b"image 00")] ^= 1
    path.write_bytes(content)


def cut(name: str, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-512])


@pytest.mark.parametrize("damage", [flip, cut])
def test_a_damaged_download_is_fetched_again_once(data: Fixture, damage: Callable[[str, Path], None]) -> None:
    def first_only(name: str, path: Path) -> None:
        if name not in data.remote.downloads:
            damage(name, path)

    data.remote.spoil = first_only
    data.read(data.cache(1), data.shards[0])
    assert data.remote.downloads == [data.shards[0]] * 2


@pytest.mark.parametrize("damage", [flip, cut])
def test_damaged_original_is_named_and_not_cached(data: Fixture, damage: Callable[[str, Path], None]) -> None:
    shard, cache = data.shards[3], data.cache(2)
    damage(shard, Path(data.remote.uri(shard)))
    for _ in range(2):
        with pytest.raises(DataError, match=f"{shard} is damaged"):
            data.read(cache, shard)
    assert list(files_in(data.remote.cache)) == []


@pytest.mark.parametrize("suffix", ["tar", "json"])
def test_a_shard_that_is_gone_is_named(data: Fixture, suffix: str) -> None:
    shard, cache = data.shards[3], data.cache(2)
    Path(data.remote.uri(shard)).with_suffix(f".{suffix}").unlink()
    with pytest.raises(DataError, match=f"{shard} is damaged.*{suffix} is missing"):
        data.read(cache, shard)


def test_file_damaged_in_the_cache_is_fetched_again(data: Fixture) -> None:
    data.read(data.cache(2), data.shards[0])
    flip("", data.cached()[0])
    data.read(data.cache(2), data.shards[0])
    assert data.remote.downloads == [data.shards[0]] * 2


def test_prefetch_errors_are_raised_by_the_step_that_needs_the_shard(data: Fixture) -> None:
    Path(data.remote.uri(data.shards[0])).unlink()
    with pytest.raises(DataError, match=r"000000\.tar is missing"):
        walk(data, data.cache(8), shuffle_shards=4, threads=True)


def test_a_shard_larger_than_the_cache_is_refused_at_once(data: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.remote, "root_uri", "gs://bucket/prepared")
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(data.remote.cache))
    too_small, found = (data.shard_bytes - 1) / GIB, r"train-0000\d\d.tar has .* GiB, the cache for shards only"
    with pytest.raises(ConfigError, match=found) as caught:
        open_shards(DataShards(data.remote), cache_gib=too_small)
    assert "data.shard_cache_gib" in caught.value.fix
    shards = DataShards(data.remote)
    (cache,) = open_shards(shards, cache_gib=too_small, in_part=[shards])  # read by range, or of another split
    assert isinstance(cache, ShardCache)
    with pytest.raises(ConfigError, match=found):
        cache.require_room(data.shards)
    cache.require_room([])
    with pytest.raises(ConfigError, match=found), cache.opened(data.shards[0]):
        pass


def test_data_that_is_read_by_range_takes_no_room_that_features_need(
    data: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.remote, "root_uri", "gs://bucket/prepared")
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(data.remote.cache))
    samples, features = DataShards(data.remote), DataShards(data.remote)
    monkeypatch.setattr(samples, "sizes", lambda: dict.fromkeys(data.shards, 100 * data.shard_bytes))
    _, cached = open_shards(samples, features, cache_gib=3 * data.shard_bytes / GIB, in_part=[samples])
    with cached.opened(data.shards[0]) as handle:
        assert handle >= 0


def test_a_full_disk_is_reported(data: Fixture) -> None:
    def full(name: str, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    data.remote.spoil = full
    with pytest.raises(UserError, match=r"no space left while keeping shards/train-000000\.tar"):
        data.read(data.cache(2), data.shards[0])


def test_a_local_folder_is_read_in_place(data: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(data.remote.cache))
    assert isinstance(open_shards(DataShards(LocalStorage(data.remote.root)))[0], ShardsInPlace)
    assert not data.remote.cache.exists()


def test_without_a_bound_the_disk_is_not_filled(data: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(data.remote.cache))
    monkeypatch.setattr(data.remote, "root_uri", "gs://bucket/prepared")
    free = [10 * data.shard_bytes]
    monkeypatch.setattr(shard_cache.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[0]))
    (cache,) = open_shards(DataShards(data.remote))
    for shard in data.shards:
        with cache.opened(shard):
            pass
    cached = sum(path.stat().st_size for path in data.remote.cache.rglob("*.whole"))
    assert cached == 8 * data.shard_bytes
    free[0] -= cached  # another process that starts now comes to the same bound
    other: Any = open_shards(DataShards(data.remote))[0]
    assert other.limit_bytes == 8 * data.shard_bytes
    monkeypatch.setattr(shard_cache.tempfile, "tempdir", str(data.remote.cache))  # temporary files are on the same disk
    other = open_shards(DataShards(data.remote), set_aside_bytes=5 * data.shard_bytes)[0]
    assert other.limit_bytes == 4 * data.shard_bytes
    other = open_shards(DataShards(data.remote), share=0.5)[0]
    assert other.limit_bytes == 4 * data.shard_bytes
    wanted_gib, refused = 6 * data.shard_bytes / GIB, r"is more than the .* GiB that .* has room for beside checkpoints"
    assert open_shards(DataShards(data.remote), cache_gib=wanted_gib)
    with pytest.raises(ConfigError, match=refused):
        open_shards(DataShards(data.remote), cache_gib=wanted_gib, set_aside_bytes=5 * data.shard_bytes)
    with pytest.raises(ConfigError, match=refused):
        open_shards(DataShards(data.remote), cache_gib=2 * wanted_gib)


SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=9)


@example(room=2366, sets=[[81, 159, 280, 374, 503, 522, 444], [2]])  # room for all, to the byte
@given(room=st.integers(0, 20_000), sets=st.lists(SIZES, min_size=1, max_size=3))
def test_sets_of_shards_divide_the_room(room: int, sets: list[list[int]]) -> None:
    in_part = [number == 0 for number in range(len(sets))]
    rooms = divide(room, sets, in_part)
    assert sum(rooms) <= room
    largest = [max(sizes) for sizes in sets]
    if sum(largest[1:]) <= room:  # the first set may do without its largest shard
        assert all(got >= size for got, size in zip(rooms[1:], largest[1:], strict=True))
    if sum(largest) <= room:
        assert sum(rooms) > room - len(sets)  # nothing is wasted but what is rounded off
        assert all(got >= size for got, size in zip(rooms, largest, strict=True))
    if room >= sum(map(sum, sets)):
        assert all(got >= sum(sizes) for got, sizes in zip(rooms, sets, strict=True))


def test_a_set_in_a_folder_takes_no_room_of_one_that_is_remote(data: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(data.remote.cache))
    monkeypatch.setattr(data.remote, "root_uri", "gs://bucket/prepared")
    here: Any = SimpleNamespace(storage=LocalStorage(data.remote.root), kind="features", sizes=lambda: {"one": 1 << 40})
    local, cached = open_shards(here, DataShards(data.remote), cache_gib=6 * data.shard_bytes / GIB)
    assert isinstance(local, ShardsInPlace)
    assert isinstance(cached, ShardCache)
    assert cached.limit_bytes == 6 * data.shard_bytes
