"""The cache of objects of Cloud Storage: fetched once, verified, and this user's alone."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.gcs.server import FakeGcs
from vlmpipe.trainer.errors import ConfigError, DataError
from vlmpipe.trainer.storage.gcs import GcsStorage


def test_a_second_fetch_downloads_nothing(gcs: GcsStorage, gcs_server: FakeGcs) -> None:
    gcs.write("a", b"bytes")
    gcs.fetch("a")
    gcs.fetch("a")
    assert _downloads(gcs_server) == 1


def test_concurrent_fetches_download_once(gcs: GcsStorage, gcs_server: FakeGcs) -> None:
    gcs.write("a", b"bytes")
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: gcs.fetch("a"), range(8)))
    assert len(paths) == 1
    assert _downloads(gcs_server) == 1


def test_damaged_cache_file_is_fetched_again(gcs: GcsStorage) -> None:
    gcs.write("a", b"bytes")
    gcs.fetch("a").write_bytes(b"bytez")
    assert gcs.fetch("a").read_bytes() == b"bytes"


def test_the_default_cache_is_for_this_user_only(
    gcs: GcsStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLMPIPE_CACHE_DIR")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    gcs.write("a", b"bytes")
    folder = next(path for path in gcs.fetch("a").parents if path.parent == tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    other_user = folder.stat().st_uid + 1
    folder.rename(folder.with_name(f"vlmpipe-cache-{other_user}"))
    monkeypatch.setattr(os, "getuid", lambda: other_user)
    with pytest.raises(ConfigError, match="another user"):
        gcs.fetch("a")


def _downloads(server: FakeGcs) -> int:
    return sum(request.startswith("GET /download/") for request in server.requests)


@pytest.mark.parametrize("mode", [0o777, 0o702])
def test_cache_folder_writable_by_others_is_refused(
    gcs: GcsStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "open"))
    gcs.write("a", b"bytes")
    with pytest.raises(ConfigError, match=f"every user .mode {mode:04o}"):
        gcs.fetch("a")


def test_the_default_cache_is_no_link(gcs: GcsStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLMPIPE_CACHE_DIR")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"vlmpipe-cache-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    gcs.write("a", b"bytes")
    with pytest.raises(ConfigError, match="is a link or a file"):
        gcs.fetch("a")


def test_planted_link_is_not_used_as_the_caches_lock(
    gcs: GcsStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    gcs.write("a", b"bytes")
    lock = gcs.fetch("a").parent / ".tmp-lock-a"
    lock.unlink()
    lock.symlink_to(victim)
    with pytest.raises(DataError, match="symbolic link"):
        gcs.fetch("a")
    assert victim.read_bytes() == b"precious"
