"""Features of many images at once are those of each, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.fakes.gcs.server import FakeGcs
from vlmpipe.trainer.errors import ConfigError, DataError
from vlmpipe.trainer.feature_cache.reader import FeatureReader, FeatureShards, missing_images
from vlmpipe.trainer.feature_cache.store import shard_name, write_shard
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.local import LocalStorage

WIDTH = 4
IMAGES = [f"{number:064x}" for number in range(7)]


def features_of(image: str, width: int = WIDTH) -> Tensor:
    """Of as many tokens as its number says, and one more."""
    number = int(image, 16)
    return (100 * number + torch.arange((number + 1) * width)).view(-1, width).to(torch.bfloat16)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> FeatureReader:
    folder, scratch = tmp_path_factory.mktemp("features"), tmp_path_factory.mktemp("scratch")
    for images in (IMAGES[::3], IMAGES[1::3], IMAGES[2::3]):
        write_shard(LocalStorage(folder), scratch, {image: features_of(image) for image in images}, tower_sha256="0")
    return FeatureReader.open(str(folder))


@given(st.lists(st.sampled_from(IMAGES), min_size=1, max_size=12))
def test_reading_many_gives_those_of_each_in_order(reader: FeatureReader, images: list[str]) -> None:
    assert torch.equal(reader.read_all(images), torch.cat([features_of(image) for image in images]))


def test_one_of_many_that_was_never_encoded_is_named(reader: FeatureReader) -> None:
    with pytest.raises(DataError, match="no cached features for image ffff"):
        reader.read_all([IMAGES[0], "f" * 64])


def test_features_of_another_width_are_refused(tmp_path: Path) -> None:
    for image, width in zip(IMAGES, (WIDTH, WIDTH + 1), strict=False):
        write_shard(LocalStorage(tmp_path / "store"), tmp_path, {image: features_of(image, width)}, tower_sha256="0")
    with pytest.raises(DataError, match=f"its features are {WIDTH + 1} wide, those of others {WIDTH}"):
        FeatureReader.open(str(tmp_path / "store")).read_all(IMAGES[:2])


@pytest.mark.parametrize("newest_first", [False, True])
def test_features_of_two_towers_are_refused_whichever_shard_is_read_first(tmp_path: Path, newest_first: bool) -> None:
    """Weights behind an address without a revision may change, and the store's key does not."""
    store = LocalStorage(tmp_path / "store")
    for number, image in enumerate(reversed(IMAGES) if newest_first else IMAGES):
        # Names of shards are digests: in the order of names the other tower's shard lies anywhere.
        write_shard(store, tmp_path, {image: features_of(image)}, tower_sha256="new" if number == 6 else "old")
    with pytest.raises(DataError, match=r"come from two towers: shard-\w+\.safetensors from the weights") as caught:
        FeatureShards(str(tmp_path / "store"))
    assert "new" in str(caught.value) and "old" in str(caught.value)


def test_features_of_another_tower_are_refused_and_an_empty_store_takes_any(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path / "store")
    FeatureShards(str(tmp_path / "store")).require_tower("new")
    write_shard(store, tmp_path, {IMAGES[0]: features_of(IMAGES[0])}, tower_sha256="old")
    FeatureShards(str(tmp_path / "store")).require_tower("old")
    with pytest.raises(ConfigError, match=r"come from another tower \(old\)"):
        FeatureShards(str(tmp_path / "store")).require_tower("new")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("number", range(3))
def test_images_of_a_shard_that_is_gone_or_cut_are_missing_until_they_are_encoded_again(
    tmp_path: Path, damage: str, number: int
) -> None:
    store, groups = LocalStorage(tmp_path / "store"), [IMAGES[start::3] for start in range(3)]
    for images in groups:
        write_shard(store, tmp_path, {image: features_of(image) for image in images}, tower_sha256="0")
    assert missing_images(str(tmp_path / "store"), IMAGES) == []
    shard = tmp_path / "store" / f"{shard_name(groups[number])}.safetensors"
    DAMAGES[damage](shard)
    found = FeatureShards(str(tmp_path / "store"))
    assert missing_images(str(tmp_path / "store"), IMAGES) == groups[number] and found.lost == (shard.name,)
    rest = [image for image in IMAGES if image not in groups[number]]
    assert len(FeatureReader.open(str(tmp_path / "store")).read_all(rest)) > 0
    write_shard(store, tmp_path, {image: features_of(image) for image in groups[number]}, tower_sha256="0")
    again = FeatureShards(str(tmp_path / "store"))
    assert (missing_images(str(tmp_path / "store"), IMAGES), again.lost) == ([], ())


def test_a_shard_whose_bytes_in_a_bucket_are_others_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeGcs(buckets=["bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        store = open_storage("gs://bucket/features")
        write_shard(store, tmp_path, {image: features_of(image) for image in IMAGES}, tower_sha256="0")
        name = f"{shard_name(IMAGES)}.safetensors"
        assert FeatureShards("gs://bucket/features").lost == ()
        data = store.read(name)
        store.write(name, data[:-1] + bytes([data[-1] ^ 1]))
        assert FeatureShards("gs://bucket/features").lost == (name,)
