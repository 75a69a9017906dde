"""What the workers of a test run share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.support.paths import ROOT

TEST_RUN_VARIABLE = "VLMPIPE_TEST_RUN"  # id of the process with which everything ends that workers share


def prepare_for_workers(config: pytest.Config) -> None:
    """Called by each pytest but workers: name this run, and spare its workers what one process can do for all."""
    os.environ[TEST_RUN_VARIABLE] = str(os.getpid())
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if whole and getattr(config.option, "numprocesses", None):
        rewrite_test_files(config, sorted(ROOT.glob("tests/**/test_*.py")))


def rewrite_test_files(config: pytest.Config, paths: list[Path]) -> None:
    """Write what is missing of pytest's own cache of test files with rewritten assertions, in a process for each core.

    In a fresh clone each worker would parse and rewrite the same hundreds of files at the same time, which takes a
    third of its collection.
    """
    missing = [path for path in paths if rewrite._read_pyc(path, rewritten(path)) is None]
    cores = os.cpu_count() or 1
    children = [_rewrite_in_fork(config, missing[core::cores]) for core in range(cores) if missing[core:]]
    for child in children:
        assert os.waitpid(child, 0)[1] == 0, "test files could not be rewritten"


def rewritten(path: Path) -> Path:
    """Where pytest looks for the rewritten form of a test file."""
    return rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"


def _rewrite_in_fork(config: pytest.Config, paths: list[Path]) -> int:
    """Rewrite files in a process of its own. Returns its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        state = config.stash[rewrite.assertstate_key]
        for path in paths:
            source_hash, module = rewrite._rewrite_test(path, config)
            rewritten(path).parent.mkdir(exist_ok=True)
            rewrite._write_pyc(state, module, source_hash, rewritten(path))
        code = 0
    finally:
        os._exit(code)
