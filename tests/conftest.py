"""What tests of every kind share."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import typer.main

from tests.support.collected import fork_workers
from tests.support.short_form import PATIENCE, WHOLE
from tests.support.workers import prepare_for_workers

if TYPE_CHECKING:
    import execnet  # xdist's, which `make test-versions` does without

pytest.register_assert_rewrite("tests.support.trainer.numeric_equality")  # what it finds is in its messages

MEMORY = Path("/dev/shm")
# Nine thousand modules are imported to collect the tests. Nothing of them is garbage: see pytest_collection_finish.
gc.disable()
# What starts in the background (`make test &`, nohup, some CI) ignores SIGINT, and so does all that it starts:
# tests would wait for ever for the end of what they have interrupted.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
# Files are tested side by side: threads of one would wait for processors that another has, and spin meanwhile.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Workers would rewrite the assertions of all test files, and processes compile all modules, each time anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Models and data sets of tests are made here: nothing is asked of the Hugging Face Hub.
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}

# An example may take as long as it does: on a busy machine that says nothing of the code.
hypothesis.settings.register_profile("patient", deadline=None, max_examples=100 if WHOLE else 30)
hypothesis.settings.load_profile("patient")

# Typer makes all commands of the program for each call in this process: tests make more than a thousand.
typer.main.get_command = functools.cache(typer.main.get_command)


@pytest.fixture(scope="session")
def _memories() -> Iterator[Path]:
    where = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="vlmpipe-tests-", dir=where, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def memory(_memories: Path) -> Iterator[Path]:
    """A folder for a few small files in memory, where there is one: flushing a file to the disk costs nothing there.

    A thread that outlives its test may write while the folder is removed: what it leaves goes with the session.
    """
    with tempfile.TemporaryDirectory(dir=_memories, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Syntax trees of all modules are millions of objects: looking for garbage in them takes a third of a test."""
    gc.disable()
    yield
    gc.enable()


# A signal that does not arrive where it should must not hold up the suite.
SENDS_SIGNALS = re.compile(r"send_signal\(|os\.kill\(|os\.killpg\(|raise_signal\(|\.terminate\(\)|press_ctrl_c\(")
SIGNAL_LIMIT_S = 240


def pytest_configure(config: pytest.Config) -> None:
    """Only the process that starts workers, or that has none, prepares what they share."""
    if not hasattr(config, "workerinput"):
        prepare_for_workers(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[execnet.XSpec]) -> None:
    """Workers are forked from one process that imports what the tests import."""
    fork_workers(config, specs)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what only `make test-whole` runs, and limit tests of a file that sends signals far below the others."""
    for item in items:
        if not WHOLE and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="make test-whole runs it"))
    sends = {path: bool(SENDS_SIGNALS.search(path.read_text())) for path in {item.path for item in items}}
    for item in items:
        if sends[item.path] and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PATIENCE * SIGNAL_LIMIT_S))


def pytest_collection_finish() -> None:
    """Collect garbage from here on, and look through what tests make only."""
    gc.freeze()
    gc.enable()
