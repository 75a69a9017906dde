"""The stand-in for a full disk takes every write of local storage: only the long form trains on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.crash.phases import Phase
from tests.support.crash.training_program import Disk
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage.local import LocalStorage


def write_in_every_way(store: LocalStorage, name: str, source: Path) -> None:
    store.create(name, b"a")
    store.write(name, b"b")
    version = store.stat(name)
    assert version is not None
    store.replace(name, b"c", version.version)
    store.upload(source, name)


def test_a_full_disk_refuses_the_files_of_its_phase_and_takes_all_others(tmp_path: Path) -> None:
    store, source = LocalStorage(str(tmp_path / "root")), tmp_path / "source"
    source.write_bytes(b"d")
    disk = Disk(tmp_path)
    disk.fail(Phase("refused"))
    try:
        write_in_every_way(store, "taken", source)
        with pytest.raises((OSError, UserError), match=r"(?i)no space left"):
            write_in_every_way(store, "refused", source)
    finally:
        disk.work()
    write_in_every_way(store, "refused", source)
