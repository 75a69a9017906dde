"""The checkpoints of one run: errors and stops while a save is under way, and what a start resumes from."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.trainer.savers import WORKER, Counter, at
from vlmpipe.trainer.checkpoint.attempts import claim_attempt, read_attempts, step_of
from vlmpipe.trainer.checkpoint.commit import committed
from vlmpipe.trainer.checkpoint.manager import Checkpoints
from vlmpipe.trainer.checkpoint.random_states import seed_random_states
from vlmpipe.trainer.config.checkpoint import CheckpointConfig
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank
from vlmpipe.trainer.storage.local import LocalStorage


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def store(memory: Path) -> LocalStorage:
    store = LocalStorage(memory / "run")
    claim_attempt(store, fresh=False)
    return store


def test_an_error_ends_training_once_the_save_under_way_is_committed(
    store: LocalStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = Counter()
    checkpoints = _checkpoints(store)
    checkpoints._strategy = checkpoints._saver._strategy = strategy  # type: ignore[assignment]
    strategy.may_write.clear()
    checkpoints.save(1, 0, 8, 2.0, Stop(None))  # type: ignore[arg-type]
    opens = threading.Timer(0.05, strategy.may_write.set)
    with pytest.raises(ZeroDivisionError), checkpoints.finished_before_errors():
        opens.start()
        raise ZeroDivisionError
    assert [step_of(name) for name in committed(store)] == [1]
    printed = capsys.readouterr().out
    assert "an error ends the job once step 1 is saved" in printed and "step 1 is saved before the end" in printed
    checkpoints._saver.finish_before_error()
    assert not capsys.readouterr().out, "nothing is under way"


class Stop:
    """A stop request that came some time ago."""

    def __init__(self, seconds_ago: float | None) -> None:
        self.requested = seconds_ago is not None
        self.requested_at = None if seconds_ago is None else time.monotonic() - seconds_ago


@pytest.mark.parametrize(
    ("seconds_ago", "saved"), [(None, [1, 2]), (0.0, [1, 2]), (27.0, [1])], ids=["no stop", "in time", "too late"]
)
def test_save_that_exceeds_the_preemption_notice_is_not_begun(
    store: LocalStorage, seconds_ago: float | None, saved: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = _checkpoints(store)
    checkpoints.save(1, 0, 8, 2.0, Stop(None))  # type: ignore[arg-type]
    checkpoints.finish("done")
    checkpoints._saver.saved = dataclasses.replace(checkpoints._saver.saved, seconds=5.0)
    checkpoints.save(2, 0, 16, 1.0, Stop(seconds_ago))  # type: ignore[arg-type]
    is_saved = checkpoints.settle(Stop(seconds_ago))  # type: ignore[arg-type]
    assert is_saved == (saved == [1, 2]), "a training whose last step is not saved has not ended"
    checkpoints.finish("preempted")
    assert [int(name.split("-")[1]) for name in committed(store)] == saved
    assert ("no time to save step 2" in capsys.readouterr().out) == (saved == [1])
    assert read_attempts(store).ended == "preempted"


def test_a_restart_continues_although_the_run_file_says_never(store: LocalStorage) -> None:
    """Only the first start of a submission gives up what earlier ones have saved."""
    begun = []
    for submission, last_step in (("one", 5), ("one", 9), ("two", 3), ("two", 7)):
        checkpoints = _checkpoints(store, resume="never", submission=submission)
        resumed = checkpoints.resume()
        begun.append(resumed.checkpoint.record.step if resumed else 0)
        checkpoints.save(last_step, 0, 8 * last_step, 2.0, Stop(None))  # type: ignore[arg-type]
        checkpoints._saver.finish()  # and no end is recorded: the job crashes
    assert begun == [0, 5, 0, 3]


def test_dropout_goes_on_in_the_same_layout_and_is_seeded_by_replica_in_another(store: LocalStorage) -> None:
    """As saved, the ranks of one model of the new layout would draw different masks."""
    torch.manual_seed(99)
    checkpoints = _checkpoints(store)
    checkpoints.save(3, 0, 24, 2.0, Stop(None))  # type: ignore[arg-type]
    going_on = torch.rand(4)
    checkpoints._saver.finish()
    assert _checkpoints(store).resume() and torch.equal(torch.rand(4), going_on)
    other = _checkpoints(store)
    other._record = dataclasses.replace(other._record, degrees=(2, 1, 1))
    resumed = other.resume()
    found = torch.rand(4)
    assert resumed and not torch.equal(found, going_on)
    seed_random_states(0, DataParallelRank(0, 1, leads=True, takes_images=True), step=3)
    assert torch.equal(torch.rand(4), found)
    assert any("is of another layout of ranks" in note for note in other.notes(resumed))


def _checkpoints(store: LocalStorage, *, resume: str = "auto", submission: str = "one") -> Checkpoints:
    from tests.support.trainer.runs import TINY

    run = {"run_id": "r", "root_uri": store.root_uri, "submission": submission}
    content = {**TINY, "run": run, "train": {**TINY["train"], "resume": resume}}
    job = JobConfig.model_validate(content).model_copy(
        update={"checkpoint": CheckpointConfig(async_save=True, preemption_notice_s=30)}
    )
    return Checkpoints(job, store, Counter(), at(1), WORKER)  # type: ignore[arg-type]
