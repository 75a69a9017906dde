"""Saving in the background: what is saved, when errors are told, and what a notice leaves no time for."""

from __future__ import annotations

import dataclasses
import errno
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.fakes.cuda import CudaDevices
from tests.support.clock import replace_time
from tests.support.trainer.checkpoints import newest_good
from tests.support.trainer.savers import DEADLINE_S, WORKER, Counter, at
from vlmpipe.trainer.checkpoint import async_saver
from vlmpipe.trainer.checkpoint.async_saver import CheckpointSaver
from vlmpipe.trainer.checkpoint.attempts import claim_attempt, step_of
from vlmpipe.trainer.checkpoint.commit import checkpoint_name, committed
from vlmpipe.trainer.checkpoint.failed_saves import FailedSaves
from vlmpipe.trainer.checkpoint.retention import Retention
from vlmpipe.trainer.checkpoint.staging import Staging, program_folder, sweep_staging
from vlmpipe.trainer.checkpoint.verified_files import fetch_folder
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage.local import LocalStorage


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def tmp_path(memory: Path) -> Path:
    return memory


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    store = LocalStorage(tmp_path / "run")
    claim_attempt(store, fresh=False)
    return store


def saver_of(store: Any, strategy: Counter, limit_s: float = 3600.0, **options: Any) -> CheckpointSaver:
    failures = FailedSaves(limit_s, retry_s=0.0)
    return CheckpointSaver(store, strategy, WORKER, Retention(2), failures, **options)  # type: ignore[arg-type]


def value_of(store: LocalStorage, tmp_path: Path) -> str:
    checkpoint, _ = newest_good(store)
    assert checkpoint is not None
    return (fetch_folder(store, checkpoint, tmp_path / "scratch") / "value").read_text()


def test_training_goes_on_while_the_state_of_the_step_is_written(store: LocalStorage, tmp_path: Path) -> None:
    strategy = Counter()
    saver = saver_of(store, strategy)
    strategy.value = 7
    strategy.may_write.clear()
    saver.save(at(1))
    strategy.value = 8  # the next step, while nothing is written yet
    assert committed(store) == []
    strategy.may_write.set()
    saved = saver.finish()
    assert committed(store) == [saved.name] and saved.seconds is not None
    assert value_of(store, tmp_path) == "7"


def test_without_async_it_is_committed_when_save_returns(store: LocalStorage) -> None:
    saver_of(store, Counter(), async_save=False).save(at(1))
    assert len(committed(store)) == 1


def test_the_next_save_waits_for_the_one_before(store: LocalStorage) -> None:
    strategy = Counter()
    saver = saver_of(store, strategy)
    strategy.may_write.clear()
    saver.save(at(1))
    second = threading.Thread(target=lambda: saver.save(at(2)))
    second.start()
    second.join(0.2)
    assert second.is_alive() and committed(store) == []
    strategy.may_write.set()
    second.join(DEADLINE_S)
    saver.finish()
    assert [int(name.split("-")[1]) for name in committed(store)] == [1, 2]


def test_an_error_waits_for_a_limited_time_and_not_for_a_save_that_failed(
    store: LocalStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = Counter()
    strategy.may_write.clear()
    saver = saver_of(store, strategy)
    saver.save(at(1))
    saver.finish_before_error(limit_s=0.05)
    assert "step 1 was not saved before the end" in capsys.readouterr().out
    strategy.may_write.set()
    saver.finish()
    away = saver_of(Failing(store, AWAY), Counter())
    away.save(at(2))
    away.finish_before_error()
    assert [step_of(name) for name in committed(store)] == [1]


def test_a_rank_whose_part_is_written_waits_for_the_commit_or_the_failure_of_rank_0(
    store: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_saver, "UNDER_WAY_POLL_S", 0.01)
    for end in ("COMMIT", "failed-0"):
        saver = saver_of(store, Counter())
        saver.save(at(3))
        assert saver._thread
        saver._thread.join()
        saver._worker = dataclasses.replace(WORKER, rank=1, local_rank=1, world_size=2, local_world_size=2)
        folder = store.root / "checkpoints" / saver._name
        (folder / "COMMIT").unlink()
        ends = threading.Timer(0.1, (folder / end).touch)
        ends.start()
        saver.finish_before_error(limit_s=DEADLINE_S)
        assert ends.finished.is_set() and (folder / end).exists()


@pytest.mark.parametrize("rank_1", [".failed-1", ".done-1"])
def test_the_folder_of_a_failed_save_is_deleted_once_no_rank_writes_into_it(
    rank_1: str, store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, folder, seen = saver_of(store, Counter()), tmp_path / "vlmpipe-save-1-0", list[bool]()
    saver._worker = dataclasses.replace(WORKER, world_size=2, local_world_size=2)

    def rank_1_writes_on(_seconds: float) -> None:
        seen.append(folder.exists())
        (folder / "its part").touch()
        (folder / rank_1).touch()

    def write() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    replace_time(monkeypatch, async_saver, sleep=rank_1_writes_on)
    saver._run(checkpoint_name(1, 2, "n" * 12), at(2), folder, Staging(folder), write, 0.0)
    assert seen == [True] and not folder.exists()
    assert saver._error is not None and saver._error.code == ExitCode.CANNOT_WRITE


class Failing:
    """A store of which one method fails with these errors, one call after the other, and then works."""

    def __init__(self, store: LocalStorage, *errors: Exception, method: str = "upload", name: str = "") -> None:
        self._store, self._method, self._name = store, method, name
        self._errors = list(errors)

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self._store, attribute)
        return partial(self._fail_first, found) if attribute == self._method else found

    def _fail_first(self, found: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self._errors and any(self._name in str(each) for each in arguments):
            raise self._errors.pop(0)
        return found(*arguments, **options)


AWAY = UserError("the store does not answer", code=ExitCode.UNAVAILABLE)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("no permission for the bucket", code=ExitCode.NO_PERMISSION), ExitCode.NO_PERMISSION),
        (OSError(28, "No space left on device"), ExitCode.CANNOT_WRITE),
        (OSError(5, "Input/output error"), ExitCode.UNEXPECTED),
    ],
)
def test_what_passes_by_itself_ends_training_only_after_the_limit(
    store: LocalStorage, error: Exception, code: ExitCode, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = saver_of(Failing(store, error), Counter())
    saver.save(at(1))
    saver.finish()
    assert saver.has_failed and saver.wants_again and committed(store) == []
    assert "the checkpoint of step 1 is not saved: " in capsys.readouterr().err
    saver.save(at(2))
    assert saver.finish().name == committed(store)[0]
    assert not saver.has_failed and not saver.wants_again
    assert "step 2 is committed; one save failed in" in capsys.readouterr().out

    impatient = saver_of(Failing(store, error), Counter(), limit_s=0.0)
    impatient.save(at(3))
    with pytest.raises(UserError, match="no checkpoint was committed since") as caught:
        impatient.finish()
    assert caught.value.code == code and "checkpoint.max_s_without_commit" in caught.value.expected


@pytest.mark.parametrize(
    "error", [ValueError("not foreseen"), UserError("refused", code=ExitCode.CONFIG)], ids=["a bug", "a refusal"]
)
def test_other_errors_are_raised_by_the_next_call(store: LocalStorage, error: Exception) -> None:
    saver = saver_of(Failing(store, error), Counter())
    saver.save(at(1))
    with pytest.raises(UserError, match=r"not foreseen|refused"):
        saver.finish()
    assert committed(store) == []


def test_a_save_that_failed_leaves_no_files_once_the_next_one_has_begun(store: LocalStorage) -> None:
    saver = saver_of(Failing(store, AWAY, method="write", name="node-0.json"), Counter())
    saver.save(at(1))
    saver.finish()
    assert [path.name for path in store.root.glob("checkpoints/*1-*/*")], "files without a manifest"
    saver.save(at(2))
    name = saver.finish().name
    assert [path.parent.name for path in store.root.glob("checkpoints/*/COMMIT")] == [name]
    assert [path.name for path in store.root.glob("checkpoints/*-*")] == [name]


def test_a_commit_whose_answer_was_lost_is_kept(store: LocalStorage) -> None:
    class Lost(LocalStorage):
        def create(self, name: str, data: bytes) -> None:
            super().create(name, data)
            if name.endswith("COMMIT") and "00000001" in name:
                raise AWAY

    saver = saver_of(Lost(store.root), Counter())
    for step in (1, 2):
        saver.save(at(step))
        saver.finish()
    assert [step_of(name) for name in committed(store)] == [1, 2]


@pytest.mark.parametrize(
    ("method", "name"), [("write", "LATEST"), ("list", "checkpoints"), ("delete", "COMMIT"), ("delete_folder", "")]
)
def test_what_fails_after_a_commit_is_a_warning_and_made_up_for(
    method: str, name: str, store: LocalStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    denied = UserError("no permission while deleting", code=ExitCode.NO_PERMISSION)
    saver = saver_of(store, Counter())
    for step in (1, 2):
        saver.save(at(step))
    saver.finish()
    failing = saver_of(Failing(store, denied, method=method, name=name), Counter())
    failing.save(at(3))
    assert failing.finish().name == committed(store)[-1] and not failing.has_failed
    assert capsys.readouterr().err.count("no permission while deleting") == 1
    failing.save(at(4))
    failing.finish()
    assert [step_of(name) for name in committed(store)] == [3, 4]


def test_a_start_that_was_superseded_commits_nothing(store: LocalStorage) -> None:
    saver = saver_of(store, Counter())
    claim_attempt(store, fresh=False)  # the platform has started the job again
    saver.save(at(1))
    with pytest.raises(UserError, match="start 2 has taken over") as caught:
        saver.finish()
    assert caught.value.code == ExitCode.SUPERSEDED and committed(store) == []


def test_leftovers_of_earlier_starts_go_with_the_first_commit(store: LocalStorage) -> None:
    store.write("checkpoints/0001-00000005-dead/shard", b"half")
    mine = claim_attempt(store, fresh=False)
    saver = saver_of(store, Counter())
    saver.save(at(9, attempt=mine.attempt))
    name = saver.finish().name
    folders = {info.name.split("/")[1] for info in store.list("checkpoints") if info.name.count("/") > 1}
    assert folders == {name}


def test_staging_of_a_living_process_is_left_alone_and_a_leftover_is_not(
    store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "vlmpipe-save-dead-0").mkdir()
    (tmp_path / "vlmpipe-save-dead-0" / "shard").write_bytes(b"large")
    (tmp_path / "vlmpipe-save-file").write_bytes(b"no folder")
    (tmp_path / "vlmpipe-save-link").symlink_to(tmp_path / "run")
    strategy = Counter()
    saver = saver_of(store, strategy)
    strategy.may_write.clear()
    saver.save(at(1))
    assert sweep_staging() == 1
    strategy.may_write.set()
    name = saver.finish().name
    assert committed(store) == [name]
    left = {path.name for path in tmp_path.glob("vlmpipe-save-*")}
    assert left == {"vlmpipe-save-file", "vlmpipe-save-link"} and store.root.is_dir()


class Written(Counter):
    """A strategy that writes a tensor by torch's own distributed checkpoint, as the torch strategies do."""

    def snapshot(self, folder: Path, group: Any) -> Callable[[], None]:
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=True)
        return lambda: dcp.save({"weight": torch.ones(8)}, storage_writer=writer, process_group=group)


def test_a_save_opens_no_context_on_another_gpu(store: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the device of rank 0 in its thread, the writer waits for a stream of GPU 0 on every rank of a node."""
    saver = saver_of(store, Written())
    devices = CudaDevices.install(monkeypatch, device=3)
    saver.save(at(1))
    assert saver.finish().name
    assert devices.contexts == {3}


def test_a_folder_stays_while_a_program_lives_that_no_launcher_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with program_folder() as scratch:
        folder = scratch.folder
        program = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(scratch.lock,), start_new_session=True
        )
    assert folder.is_dir() and "is left: the program still runs" in capsys.readouterr().err
    assert sweep_staging() == 0 and folder.is_dir(), "nor does a later start delete it"
    program.communicate(b"\n")
    assert sweep_staging() == 1 and not folder.exists()
