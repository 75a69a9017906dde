"""The images of a feature store: arrays of a process, or of a file that a machine's processes share."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.data.shards.image_index import hashes_of
from vlmpipe.trainer.data.shards.verified_files import Sidecar
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.feature_cache import image_places
from vlmpipe.trainer.feature_cache.image_places import HeldImages, ImagePlaces, open_places
from vlmpipe.trainer.storage.base import ObjectInfo

FILES = [ObjectInfo("shard-0.json", 1, "version")]


def hash_of(number: int) -> str:
    return hashlib.sha256(bytes([number])).hexdigest()


def held(groups: list[list[int]]) -> Iterator[HeldImages | str]:
    for number, group in enumerate(groups):
        shard = Sidecar(f"shard-{number}.safetensors", len(group), 10 + number, number)
        yield HeldImages(shard, "tower", list(map(hash_of, group)))
    yield "shard-lost.safetensors"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of shared files, in which every store has one."""
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(image_places, "SHARED_FROM_BYTES", 0)
    return tmp_path / "cache" / image_places.CACHE_FOLDER


@given(groups=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True), max_size=6))
def test_a_shared_file_has_what_a_process_has_in_memory(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[int]]
) -> None:
    in_memory = open_places("store", FILES, lambda: held(groups))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_places, "SHARED_FROM_BYTES", 0)
        patch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        shared = open_places("store", FILES, lambda: held(groups))
    assert shared[0] == in_memory[0] and shared[0].lost == ("shard-lost.safetensors",)
    for name in ("images", "shards", "places"):
        assert np.array_equal(getattr(shared[1], name), getattr(in_memory[1], name))
    wanted = [number for group in groups for number in group]
    for places in (shared[1], in_memory[1]):
        found = places.find(map(hash_of, wanted))
        for number, position in zip(wanted, found.tolist(), strict=True):
            group = groups[places.shards[position]]
            assert sorted(map(hash_of, group))[places.places[position]] == hash_of(number)
        assert places.find([hash_of(41)]).tolist() == [-1]


def opened(groups: list[list[int]], files: list[ObjectInfo] = FILES) -> tuple[ImagePlaces, int]:
    """The images, and how often the sidecars were read."""
    read = 0

    def sidecars() -> Iterator[HeldImages | str]:
        nonlocal read
        read += 1
        return held(groups)

    return open_places("store", files, sidecars)[1], read


def test_one_process_of_a_machine_reads_the_sidecars(cache: Path) -> None:
    assert opened([[1, 2], [3]])[1] == 1
    places, read = opened([[1, 2], [3]])
    assert read == 0 and isinstance(places.images.base, np.memmap | np.ndarray)
    assert sorted(places.images.tolist()) == sorted(hashes_of(map(hash_of, [1, 2, 3])).tolist())


def test_another_list_of_files_or_damage_lead_to_another_reading(cache: Path) -> None:
    opened([[1, 2]])
    assert opened([[1, 2], [3]], [*FILES, ObjectInfo("shard-1.json", 1, "version")])[1] == 1
    assert opened([[1, 2]], [ObjectInfo("shard-0.json", 1, "later")])[1] == 1
    for path in cache.iterdir():
        if not path.suffix:
            path.write_bytes(b"x" * path.stat().st_size)
    places, read = opened([[1, 2]])
    assert read == 1 and (places.find([hash_of(2)]) >= 0).all()
    for path in cache.glob("*.json"):
        path.write_text("{}")
    assert opened([[1, 2]])[1] == 1


def test_files_used_last_are_kept(cache: Path) -> None:
    for number in range(image_places.KEPT + 2):
        opened([[number]], [ObjectInfo("shard-0.json", 1, str(number))])
    assert len(list(cache.glob("*.json"))) == image_places.KEPT
    assert len([path for path in cache.iterdir() if not path.suffix]) == image_places.KEPT


def test_without_a_cache_folder_each_process_reads_the_sidecars(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.parent.parent.joinpath("file").write_text("")
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(cache.parent.parent / "file" / "below"))
    assert opened([[1]])[1] == 1 and "set VLMPIPE_CACHE_DIR" in capsys.readouterr().err


def test_without_locks_or_room_each_process_reads_the_sidecars(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        assert opened([[1, 2]])[1] == 1 and "No locks available" in capsys.readouterr().err
    monkeypatch.setattr(Path, "replace", refuse)
    assert opened([[1, 2]])[1] == 2 and "set VLMPIPE_CACHE_DIR" in capsys.readouterr().err


def test_what_killed_processes_left_is_deleted(cache: Path) -> None:
    opened([[1]])
    left = [cache / "ab.part", cache / "cd", cache / "ef.part"]
    for path in left:
        path.write_bytes(b"half")
    for path in left[:2]:
        os.utime(path, (0, 0))
    opened([[2]], [ObjectInfo("shard-0.json", 1, "later")])
    assert [path.exists() for path in left] == [False, False, True], "another process may be writing the last"


def test_what_is_wrong_with_a_sidecar_is_raised_and_leaves_no_file(cache: Path) -> None:
    def damaged() -> Iterator[HeldImages | str]:
        yield next(held([[1]]))
        raise DataError("a sidecar is damaged")

    for _ in range(2):
        with pytest.raises(DataError, match="a sidecar is damaged"):
            open_places("store", FILES, damaged)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
