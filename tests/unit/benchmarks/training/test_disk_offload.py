"""Disk offloading's benchmark: only the making of its control group may fail."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from benchmarks.training.disk_offload import limited


def test_where_there_are_no_control_groups_there_is_none(tmp_path: Path) -> None:
    with limited(1 << 20, tmp_path / "none") as group:
        assert group is None


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC])
@pytest.mark.parametrize("call", ["mkdir", "write_text"])
def test_where_none_can_be_made_there_is_none(
    number: int, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, call, refused)
    with limited(1 << 20, tmp_path) as group:
        assert group is None
    assert not list(tmp_path.iterdir())


def test_an_error_of_what_is_done_in_it_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="rows"), limited(1 << 20, tmp_path / "none"):
        raise FileNotFoundError("rows")
