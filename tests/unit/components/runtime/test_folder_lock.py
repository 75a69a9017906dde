"""One pipeline job at a time holds a run's folder, whoever asks, whenever, and however often."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlmpipe.components.runtime.folder_lock import (
    FILE,
    OVER,
    RUNNING,
    Holder,
    leaving_folder,
    read_holder,
    take_folder,
)
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.local import LocalStorage


def never_asked(holder: Holder) -> str:
    raise AssertionError(f"{holder} was asked for")


def says(state: str) -> Callable[[Holder], str]:
    return lambda _: state


def silent(_: Holder) -> str:
    raise UserError("no permission", code=ExitCode.NO_PERMISSION)


def take(store: Storage, job: str, state_of: Callable[[Holder], str] = never_asked) -> str:
    return take_folder(store, Holder(job, "vertex", "p", "l"), state_of)


def holder(store: Storage) -> str:
    found, _ = read_holder(store)
    return found.job_name if found else ""


def test_a_clone_is_refused_while_the_original_runs_and_takes_over_after_it(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    assert take(store, "job-1") == "" and take(store, "job-1") == "", "a repeated step of one job"
    with pytest.raises(UserError, match="job-1 holds this run's folder and is still running") as refused:
        take(store, "job-2", says(RUNNING))
    assert refused.value.code == ExitCode.UNAVAILABLE and holder(store) == "job-1"
    assert "job-1, which held this folder before, has ended" in take(store, "job-2", says(OVER))
    assert holder(store) == "job-2"


def test_a_service_that_does_not_say_decides_by_the_exit_handler(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    take(store, "job-1")
    with pytest.raises(UserError, match="whether it still runs is not known: no permission") as refused:
        take(store, "job-2", silent)
    assert str(store.uri(FILE)) in refused.value.text()
    with leaving_folder(store, "job-1") as other:
        assert other is None
    take(store, "job-2", silent)
    assert holder(store) == "job-2"
    store.delete(FILE)  # the remedy
    assert take(store, "job-3") == ""


def test_a_retry_of_a_closed_job_is_seen(tmp_path: Path) -> None:
    """Kubeflow repeats failed steps of a run that has ended: its exit handler has run, and it runs again."""
    store = LocalStorage(tmp_path)
    take(store, "job-1")
    with leaving_folder(store, "job-1"):
        pass
    with pytest.raises(UserError, match="still running"):
        take(store, "job-2", says(RUNNING))


def test_a_refused_job_closes_nothing(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    take(store, "job-1")
    with leaving_folder(store, "job-2") as other:
        assert other and other.job_name == "job-1"
    found, _ = read_holder(store)
    assert found == Holder("job-1", "vertex", "p", "l")
    with pytest.raises(ZeroDivisionError), leaving_folder(store, "job-1"):
        raise ZeroDivisionError
    assert (found := read_holder(store)[0]) and found.closed, "also after an error of the last step"


def test_a_damaged_record_is_nobodys(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    take(store, "job-1")
    (tmp_path / FILE).write_bytes(b"{")
    assert take(store, "job-2") == "" and holder(store) == "job-2"


def test_of_many_jobs_at_once_one_holds_the_folder(memory: Path) -> None:
    store, start, outcomes = LocalStorage(memory), threading.Barrier(8), list[str]()

    def begin(job: str) -> None:
        start.wait()
        try:
            take(store, job, says(RUNNING))
            outcomes.append(job)
        except UserError:
            outcomes.append("")

    threads = [threading.Thread(target=begin, args=(f"job-{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 8 and [job for job in outcomes if job] == [holder(store)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["take", "end", "kill"])), max_size=20))
def test_no_job_takes_the_folder_of_one_that_runs(memory: Path, events: list[tuple[str, str]]) -> None:
    store = LocalStorage(memory)
    store.delete(FILE)
    running, held = set[str](), ""
    for job, event in events:
        if event == "take":
            running.add(job)
            try:
                take(store, job, lambda other: RUNNING if other.job_name in running else OVER)
            except UserError:
                assert held in running and held != job
                running.discard(job)  # a refused job ends
            else:
                assert held in ("", job) or held not in running
                held = job
        elif event == "end":
            with leaving_folder(store, job):
                running.discard(job)
        else:
            running.discard(job)
        assert holder(store) == held
