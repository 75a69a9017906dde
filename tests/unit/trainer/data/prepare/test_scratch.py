"""Temporary folders: those of killed preparations are removed, those in use stay."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from vlmpipe.trainer.data.prepare.scratch import LOCK, PREFIX, scratch, sweep


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_goes_at_the_end_also_after_an_error(root: Path) -> None:
    with pytest.raises(ValueError, match="oops"), scratch() as folder:
        (folder / "chunk").write_bytes(b"x")
        assert folder.parent == root
        raise ValueError("oops")
    assert list(root.iterdir()) == []


def test_what_a_killed_preparation_left_is_removed_by_the_next(root: Path) -> None:
    left = root / f"{PREFIX}killed"
    (left / "set").mkdir(parents=True)
    (left / "set" / "shard.tar").write_bytes(b"x" * 1000)
    left.with_name(left.name + LOCK).touch()
    other = root / "vlmpipe-other"
    other.mkdir()
    with scratch() as folder:
        assert sorted(path.name for path in root.iterdir() if path.is_dir()) == sorted([folder.name, other.name])
        assert sweep(root) == 0, "a folder in use stays"
    assert list(root.iterdir()) == [other]
