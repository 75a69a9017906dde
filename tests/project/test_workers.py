"""What workers of a test run share is what they would make by themselves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.support.trainer.preloaded import Preloaded
from tests.support.workers import rewrite_test_files, rewritten


def test_rewritten_files_are_where_pytest_looks_for_them(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    assert rewrite._read_pyc(Path(__file__), rewritten(Path(__file__))) is not None, "pytest has written that itself"
    paths = [tmp_path / f"test_{number}.py" for number in range(3)]
    for path in paths:
        path.write_text("def test_it():\n    assert 1 + 1 == 2\n", encoding="utf-8")
    rewrite_test_files(pytestconfig, paths)
    assert all(rewrite._read_pyc(path, rewritten(path)) is not None for path in paths)


def test_workers_fork_ranks_from_one_process_and_a_fork_that_is_killed_leaves_the_others(tmp_path: Path) -> None:
    output = tmp_path / "output"

    def end(worker: Preloaded, module: str) -> list[int]:
        rank = {"environment": dict(os.environ), "output": str(output)}
        return worker.run(module, [], [rank], timeout_s=60)

    first, second = Preloaded(), Preloaded()
    assert second._started is None, "the process is there already"
    assert end(first, "this") == end(second, "this") == [0]
    assert output.read_text(encoding="utf-8").count("Zen of Python") == 2
    first._kill_with_ranks()
    assert end(second, "no_such_module") == [1]
    assert end(second, "this") == [0]
