"""SIGKILL at every registered point of the protocol. A point that nothing reaches fails here: nobody is killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.crash.cases import FULL, case
from tests.support.crash.world import after_a_fault, ended, loaded, run_once, save, upload
from vlmpipe.trainer.checkpoint.attempts import claim_attempt
from vlmpipe.trainer.checkpoint.commit import checkpoint_name, committed
from vlmpipe.trainer.checkpoint.fault_points import POINTS
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.local import LocalStorage

OF_THE_SAVER = ("snapshot taken", "files written")  # before anything is uploaded: they need tensors and a process group
COMMITTED_FROM = POINTS.index("after COMMIT")
NOT_LOADED = {"store is away": ExitCode.UNAVAILABLE, "disk for temporary files is full": ExitCode.CANNOT_WRITE}


def before_the_crash(store: Storage, scratch: Path) -> str:
    """A first start saved steps 1 to 3 and was killed in its fourth save. Returns its newest checkpoint."""
    attempt = claim_attempt(store, fresh=False).attempt
    newest = [save(store, scratch, step, attempt=attempt) for step in (1, 2, 3)][-1]
    upload(store, scratch, checkpoint_name(attempt, 4, "left"), 4, nodes=range(1))
    return newest


def require_old_or_new(store: Storage, scratch: Path, point: str, old: str) -> None:
    new = set(committed(store)) - {old, *(checkpoint_name(1, step, "a") for step in (1, 2))}
    assert len(new) == (POINTS.index(point) >= COMMITTED_FROM)
    after_a_fault(store, scratch, allowed=new or {old})


@case(
    "crash points",
    "SIGKILL at “{}”",
    "the old or the new checkpoint, whole; the same command commits and cleans up",
    point=[point for point in POINTS if point not in OF_THE_SAVER],
)
def test_killed_at_a_point_of_the_protocol(point: str, store: Storage, scratch: Path, request: Any) -> None:
    old = before_the_crash(store, scratch)
    host = (
        {} if isinstance(store, LocalStorage) else {"STORAGE_EMULATOR_HOST": request.getfixturevalue("server").endpoint}
    )
    done = ended(point, "tests.support.crash.program", store.root_uri, str(scratch), **host)
    assert done.returncode == -signal.SIGKILL, f"never came to {point!r}: {done.stderr}"
    require_old_or_new(store, scratch, point, old)


@pytest.fixture(scope="module")
def savers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The real CheckpointSaver and resume, forked once for each point, so that torch is imported once."""
    root = tmp_path_factory.mktemp("savers")
    points = POINTS if FULL else OF_THE_SAVER
    for number, _ in enumerate(points):
        before_the_crash(LocalStorage(root / str(number)), root)
    done = ended("", "tests.support.crash.saver_program", str(root), *points, TMPDIR=str(root))
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout.splitlines()[-1])


@case(
    "crash points",
    "SIGKILL of a training process, saver thread at “{}”",
    "the old or the new checkpoint, whole; the same command commits and cleans up",
    short=OF_THE_SAVER,
    point=POINTS,
)
def test_the_saver_killed_at_a_point(point: str, savers: tuple[Path, dict[str, Any]], scratch: Path) -> None:
    root, found = savers
    assert found["killed"][point] == -signal.SIGKILL, f"never came to {point!r}"
    number = list(found["killed"]).index(point)
    require_old_or_new(LocalStorage(root / str(number)), scratch, point, checkpoint_name(1, 3, "a"))


@case(
    "disk",
    "staging folders of killed processes are left in TMPDIR",
    "the next start deletes them before it checks free space; those of a living process stay",
)
def test_staging_folders_of_killed_processes_are_swept(savers: tuple[Path, dict[str, Any]]) -> None:
    """Of a living process: tests/unit/trainer/checkpoint/test_async_saver.py."""
    before, swept, after = savers[1]["staging"]
    assert before == swept > 0 and after == 0


@case(
    "process",
    "SIGTERM while a checkpoint is saved, at “{}”",
    "it is deferred until the save is done: the new checkpoint is committed, and old ones are deleted",
    short=OF_THE_SAVER,
    point=POINTS,
)
def test_a_stop_request_breaks_nothing_off(point: str, savers: tuple[Path, dict[str, Any]]) -> None:
    assert savers[1]["asked"][point] == {"end": 0, "committed": [2]}


FAILURES = {
    "it fails with an unexpected error": ExitCode.UNEXPECTED,
    "its temporary folder is not there": ExitCode.CONFIG,
}


@case(
    "process",
    "a save fails at its beginning on one rank of two: {}",
    "both ranks end at once with the same exit code; no rank waits, and no staging folder is left",
    failure=FAILURES,
)
def test_what_fails_on_one_rank_ends_all(failure: str, savers: tuple[Path, dict[str, Any]]) -> None:
    found = savers[1]["on_one_rank"][failure]
    assert found["ends"] == [FAILURES[failure]] * 2
    assert found["seconds"] < 30 and found["left"] == found["committed"] == []


@case(
    "outage",
    "a save fails on one node of two: {}",
    "both nodes go on, and their next save is committed; no staging folder is left",
    failure=("its state cannot be written", "its store is away"),
)
def test_an_outage_of_one_node_ends_nothing(failure: str, savers: tuple[Path, dict[str, Any]]) -> None:
    found = savers[1]["on_one_rank"][failure]
    assert found["ends"] == [0, 0] and found["committed"] == [2]
    assert found["seconds"] < 30 and found["left"] == []


def test_a_start_that_is_not_killed_commits(local: LocalStorage, scratch: Path) -> None:
    """What the killed ones are measured against."""
    before_the_crash(local, scratch)
    newest = run_once(local, scratch)
    assert loaded(local, scratch).name == newest and committed(local) == [newest]


REFUSALS = {
    "another packing plan": "the data or the packing plan changed",
    "another model": "the model section of the run file changed",
    "another format": "the strategy's checkpoint format changed",
    "another vision encoder": "the frozen tower's weights changed",
    "another base under adapters": "the frozen weights beside a frozen tower's changed",
}


@case(
    "topology",
    "resumed with {}",
    "refused with a message (64); nothing is loaded or deleted",
    change=REFUSALS,
)
def test_a_checkpoint_of_something_else_is_refused(change: str, savers: tuple[Path, dict[str, Any]]) -> None:
    refused = savers[1]["refused"][change]
    assert REFUSALS[change] in refused["text"]
    assert refused["code"] == 64 and refused["loaded"] == [] and refused["kept"]


@case(
    "topology",
    "the checkpoint folder holds only foreign files, such as another program's",
    "refused with a message (64), no silent fresh start; nothing is deleted",
)
def test_a_folder_that_is_no_checkpoint(savers: tuple[Path, dict[str, Any]]) -> None:
    found = savers[1]["strangers"]
    assert found["code"] == 64 and found["kept"]
    assert "holds no checkpoint of this run, but global_step9" in found["text"]


def test_another_number_of_ranks_is_welcome_in_dcp(savers: tuple[Path, dict[str, Any]]) -> None:
    """Its files are by parameter name. The real reshard is in
    tests/integration/trainer/checkpoint/test_elastic_resume.py."""
    assert savers[1]["other_ranks_in_dcp"] == 3


@case(
    "bytes",
    "a flipped bit, detected by the training processes when they resume",
    "the previous one is loaded on all ranks; the damaged one is marked and kept",
)
def test_resume_passes_over_a_flipped_bit(savers: tuple[Path, dict[str, Any]]) -> None:
    found = savers[1]["damaged"]
    assert found["loaded"] == [2] and "deep/shard-1 differs from its CRC32C" in found["passed_over"][0]
    assert found["marked"] and found["kept"]


@case(
    "outage",
    "while a checkpoint is loaded, the {}",
    "the start ends with 69 or 73; no checkpoint is marked as damaged or passed over, and the next start loads it",
    fault=NOT_LOADED,
)
def test_a_checkpoint_is_not_given_up_where_loading_it_fails(fault: str, savers: tuple[Path, dict[str, Any]]) -> None:
    expected = {"code": NOT_LOADED[fault], "changed": [], "left": 0, "loaded": [3]}
    assert savers[1]["not_loaded"][fault] == expected
