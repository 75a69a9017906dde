"""What workers of a test run share is what they would make by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.support.workers import rewrite_test_files, rewritten


def test_rewritten_files_are_where_pytest_looks_for_them(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    assert rewrite._read_pyc(Path(__file__), rewritten(Path(__file__))) is not None, "pytest has written that itself"
    paths = [tmp_path / f"test_{number}.py" for number in range(3)]
    for path in paths:
        path.write_text("def test_it():\n    assert 1 + 1 == 2\n", encoding="utf-8")
    rewrite_test_files(pytestconfig, paths)
    assert all(rewrite._read_pyc(path, rewritten(path)) is not None for path in paths)
