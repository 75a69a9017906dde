"""Symbolic links in a folder that is a storage: none leads out of it, and a broken one is no end of a listing."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpipe.trainer.errors import ConfigError, UserError
from vlmpipe.trainer.storage.local import LocalStorage


@pytest.mark.parametrize("link", ["a", "folder/a"])
@pytest.mark.parametrize("method", ["read", "fetch"])
def test_reading_does_not_follow_a_link_out_of_the_root(tmp_path: Path, method: str, link: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_bytes(b"secret")
    store = LocalStorage(tmp_path / "root")
    store.root.mkdir()
    first = Path(link).parts[0]
    (store.root / first).symlink_to(outside / "a" if first == "a" else outside)
    with pytest.raises(ConfigError, match="outside of"):
        getattr(store, method)(link)


def test_writing_does_not_follow_a_link_out_of_the_root(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_bytes(b"precious")
    store = LocalStorage(tmp_path / "root")
    store.root.mkdir()
    (store.root / "folder").symlink_to(outside)
    for write in (store.write, store.create):
        with pytest.raises(ConfigError, match="outside of"):
            write("folder/a", b"new")
    with pytest.raises(ConfigError, match="outside of"):
        store.delete("folder/a")
    assert [path.read_bytes() for path in outside.iterdir()] == [b"precious"]


def test_a_link_inside_the_root_is_read_and_replaced(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    store.write("real", b"old")
    (tmp_path / "link").symlink_to("real")
    assert store.read("link") == b"old"
    store.write("link", b"new")
    assert (store.read("link"), store.read("real")) == (b"new", b"old")


def test_planted_link_is_not_used_as_a_lock(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    store = LocalStorage(tmp_path / "root")
    store.write("CHAMPION", b"1")
    (store.root / ".tmp-lock-CHAMPION").symlink_to(victim)
    info = store.stat("CHAMPION")
    assert info
    with pytest.raises(UserError, match="symbolic link"):
        store.replace("CHAMPION", b"2", info.version)
    assert victim.read_bytes() == b"precious"


def test_broken_link_is_listed_and_cannot_be_read(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    store.write("a", b"1")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("not-here")
    assert [info.name for info in store.list()] == ["a", "loop", "nowhere"]
    with pytest.raises(UserError, match="loop of symbolic links"):
        store.read("loop")
    with pytest.raises(UserError, match="no such file"):
        store.read("nowhere")
