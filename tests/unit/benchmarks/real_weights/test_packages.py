"""Files of packages: only those that were looked at when their checksum was written down."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from benchmarks.real_weights.packages import package_file


def test_a_file_is_given_by_its_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "holds_weights").mkdir()
    (tmp_path / "holds_weights/__init__.py").write_text("raise AssertionError('it is not imported')")
    (tmp_path / "holds_weights/file").write_bytes(b"weights")
    found = hashlib.sha256(b"weights").hexdigest()
    assert package_file("holds_weights/file", found).read_bytes() == b"weights"
    with pytest.raises(ValueError, match=f"has SHA-256 {found}, expected 00"):
        package_file("holds_weights/file", "00")
    with pytest.raises(ValueError, match="package of no_such_package/file is not installed"):
        package_file("no_such_package/file", "00")
