"""SIGKILL of the launcher at every point of the copies that it makes of a training program's files."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.crash.cases import FULL, case
from tests.support.crash.states_program import copy_next, job_in, keep_result, written
from tests.support.crash.world import ended
from tests.support.trainer.checkpoints import newest_good
from vlmpipe.trainer.checkpoint.commit import Listing, committed
from vlmpipe.trainer.checkpoint.fault_points import POINTS
from vlmpipe.trainer.external.checkpoints.resuming import fetch_state, state_folder
from vlmpipe.trainer.external.checkpoints.states import newest_result, results_of, states_of

OF_A_COPY = [point for point in POINTS if point not in ("snapshot taken", "files written")]
OF_A_RESULT = OF_A_COPY[: OF_A_COPY.index("after LATEST") + 1]  # the one result is never an old one
SHORT = ("before COMMIT",)
Ends = tuple[Path, dict[str, list[int]]]


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """The run of each point, and how the launchers ended."""
    root = tmp_path_factory.mktemp("programs")
    done = ended("", "tests.support.crash.states_program", str(root), *(OF_A_COPY if FULL else SHORT))
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout.splitlines()[-1])


@case(
    "crash points",
    "SIGKILL of the launcher of a training program of one's own, while it copies a checkpoint, at “{}”",
    "the program is given the old or the new checkpoint, whole; the next start copies a newer one and cleans up",
    short=SHORT,
    point=OF_A_COPY,
)
def test_the_launcher_killed_while_it_copies(point: str, launchers: Ends, tmp_path: Path) -> None:
    root, ends = launchers
    place = root / str(list(ends).index(point))
    assert ends[point][0] == -signal.SIGKILL, f"never came to {point!r}"
    job = job_in(place)
    store = states_of(job.run.run_uri)
    found, passed_over = newest_good(store)
    is_new = OF_A_COPY.index("after COMMIT") <= OF_A_COPY.index(point) < OF_A_COPY.index("leftovers half swept")
    assert found and found.record.step == (4 if is_new else 3) and not passed_over
    fetch_state(store, found, tmp_path)
    expected = written(tmp_path / "expected", found.record.step)
    assert {file.name: file.read_bytes() for file in state_folder(tmp_path, found).iterdir()} == expected
    shutil.rmtree(place / "program")  # of the machine that is lost
    assert copy_next(place) == found.record.step + 1
    listing = Listing.read(store)
    assert listing.folders == set(listing.committed) and len(listing.committed) == 1


@case(
    "crash points",
    "SIGKILL of the launcher of a training program of one's own, while it keeps the finished model, at “{}”",
    "there is no result, or the whole one; the next start keeps it and cleans up",
    short=SHORT,
    point=OF_A_RESULT,
)
def test_the_launcher_killed_while_it_keeps_the_result(point: str, launchers: Ends) -> None:
    root, ends = launchers
    place = root / f"result-{list(ends).index(point)}"
    assert ends[point][1] == -signal.SIGKILL, f"never came to {point!r}"
    job = job_in(place)
    has_one = OF_A_RESULT.index(point) >= OF_A_RESULT.index("after COMMIT")
    assert (newest_result(job)[1] is not None) == has_one
    keep_result(place)
    results = results_of(job.run.run_uri)
    _, found, passed_over = newest_result(job)
    assert found and found.record.step == 9 and not passed_over
    assert Listing.read(results).folders == set(committed(results)) and len(committed(results)) == 1
