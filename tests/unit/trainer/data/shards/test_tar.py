"""Shards: offsets are right for any name, and no damage goes unnoticed."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.shards.tar import Members, ShardReader, ShardWriter, member_header, sample_json
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.storage.local import LocalStorage

TURNS = (Turn("what?", "é 7", "all", system="brief"), Turn("and?", "", "all", thinking="hm"))


def write(folder: Path, keys: list[str], *, shard_samples: int = 100) -> list[Members]:
    writer = ShardWriter(folder, "train", shard_samples)
    images = [("png", b"first image"), ("jpg", b"")]
    members = [writer.add(key, sample_json(key, TURNS), images) for key in keys]
    writer.close()
    return members


@given(lengths=st.lists(st.integers(1, 117), min_size=1, max_size=6, unique=True))
def test_members_are_where_the_writer_says(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    folder = tmp_path_factory.mktemp("shards")
    reader = None
    for members in write(folder, ["k" * length for length in lengths]):
        reader = reader or ShardReader.open(LocalStorage(folder))
        assert reader.turns(members) == TURNS
        assert reader.images(members) == [b"first image", b""]
    with tarfile.open(folder / "shards" / "train-000000.tar") as tar:
        assert len(tar.getnames()) == 3 * len(lengths)


@given(name=st.text(min_size=1, max_size=150), size=st.integers(0, 3 * 8**11))
def test_headers_are_those_of_tarfile(name: str, size: int) -> None:
    info = tarfile.TarInfo(name)
    info.size = size
    assert member_header(name, size) == info.tobuf(tarfile.GNU_FORMAT)


def test_a_full_shard_is_followed_by_the_next(tmp_path: Path) -> None:
    members = write(tmp_path, [f"k{n}" for n in range(5)], shard_samples=2)
    assert [place.shard for place in members] == [f"shards/train-{n:06d}.tar" for n in (0, 0, 1, 1, 2)]
    reader = ShardReader.open(LocalStorage(tmp_path))
    assert all(reader.turns(place) == TURNS for place in members)


def test_an_image_with_a_hash_is_in_a_shard_once(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", 3)
    shown = [("a", "b"), ("b",), ("b", "b"), ("b",)]  # by hash; the last sample is in a shard of its own
    members = [
        writer.add(f"k{n}", sample_json(f"k{n}", TURNS), [("png", name.encode()) for name in names], names)
        for n, names in enumerate(shown)
    ]
    writer.close()
    reader = ShardReader.open(LocalStorage(tmp_path))
    assert [reader.images(place) for place in members] == [[name.encode() for name in names] for names in shown]
    stored: list[str] = []
    for number in (0, 1):
        with tarfile.open(tmp_path / f"shards/train-{number:06d}.tar") as tar:
            stored += [name for name in tar.getnames() if name.endswith("png")]
    assert stored == ["k0.0.png", "k0.1.png", "k3.0.png"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"first image")] ^= 1  # a payload byte: the tar stays readable
    path.write_bytes(data)


def cut_between_samples(path: Path) -> None:
    with tarfile.open(path) as tar:
        end = tar.getmember("k3.json").offset
    path.write_bytes(path.read_bytes()[:end])  # a tar reader would see fewer samples and no error


def break_sidecar(path: Path) -> None:
    path.with_suffix(".json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "CRC32C"),
        (cut_between_samples, "bytes instead of"),
        (Path.unlink, "train-000000.tar is missing"),
        (lambda path: path.with_suffix(".json").unlink(), "train-000000.json is missing"),
        (break_sidecar, "sidecar cannot be read"),
    ],
)
def test_damage_is_noticed_before_a_member_is_used(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    members = write(tmp_path, [f"k{n}" for n in range(5)])
    damage(tmp_path / "shards" / "train-000000.tar")
    with pytest.raises(DataError, match=message):
        ShardReader.open(LocalStorage(tmp_path)).turns(members[0])
