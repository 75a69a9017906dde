"""Starts of a run are numbered, and a run that crashes again and again where it began is given up."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import MEMORY
from vlmpipe.trainer.checkpoint.attempts import (
    Attempts,
    attempt_of,
    begin_at,
    claim_attempt,
    note_end,
    read_attempts,
    require_beginning,
    require_current,
)
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import seal


@pytest.fixture
def tmp_path(memory: Path) -> Path:
    return memory


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


def start(store: LocalStorage, step: int, *, most: int = 2, fresh: bool = False) -> Attempts:
    mine = claim_attempt(store, fresh=fresh)
    begin_at(store, mine, step, most=most)
    return mine


def test_a_run_that_never_started_has_none(store: LocalStorage) -> None:
    assert read_attempts(store) == Attempts()


def test_each_start_takes_the_next_number(store: LocalStorage) -> None:
    assert [claim_attempt(store, fresh=False).attempt for _ in range(3)] == [1, 2, 3]


def test_fresh_start_gives_up_earlier_checkpoints_for_good(store: LocalStorage) -> None:
    claim_attempt(store, fresh=False)
    assert claim_attempt(store, fresh=True).fresh_from == 2
    assert claim_attempt(store, fresh=False).fresh_from == 2
    assert claim_attempt(store, fresh=True).fresh_from == 4


def test_a_submission_gives_up_earlier_checkpoints_once_however_often_it_is_restarted(store: LocalStorage) -> None:
    """A platform's restart reads the same run file, with train.resume never."""
    claim_attempt(store, fresh=False, submission="one")
    found = [claim_attempt(store, fresh=True, submission=name).fresh_from for name in ("two", "two", "three", "three")]
    assert found == [2, 2, 4, 4]
    assert claim_attempt(store, fresh=False, submission="three").fresh_from == 4


def test_crashes_of_a_submission_that_began_anew_are_counted(store: LocalStorage) -> None:
    """Otherwise a job that always crashes would be restarted for ever."""
    for _ in range(3):
        begin_at(store, claim_attempt(store, fresh=True, submission="one"), 0, most=3)
    with pytest.raises(UserError, match="crashed 3 times in a row"):
        begin_at(store, claim_attempt(store, fresh=True, submission="one"), 0, most=3)


def test_only_the_last_start_is_current(store: LocalStorage) -> None:
    first, second = claim_attempt(store, fresh=False), claim_attempt(store, fresh=False)
    require_current(store, second.attempt)
    for act in (lambda: require_current(store, first.attempt), lambda: begin_at(store, first, 0, most=0)):
        with pytest.raises(UserError, match="start 2 has taken over") as caught:
            act()
        assert caught.value.code == ExitCode.SUPERSEDED


def test_end_of_a_superseded_start_is_ignored(store: LocalStorage) -> None:
    first = start(store, 0)
    start(store, 0)
    note_end(store, first, "done")
    assert read_attempts(store).ended == ""


def test_crashes_at_one_step_are_counted_and_end_the_run(store: LocalStorage) -> None:
    for count in range(3):
        start(store, 20, most=3)
        assert read_attempts(store).without_progress == count
    with pytest.raises(UserError, match=r"crashed 3 times in a row .* at step 20") as caught:
        start(store, 20, most=3)
    assert caught.value.code == ExitCode.NO_PROGRESS
    with pytest.raises(UserError):  # and it stays so
        start(store, 20, most=3)


def test_crashes_before_a_checkpoint_is_loaded_end_the_run_as_well(store: LocalStorage) -> None:
    """Such as a lack of memory while it loads."""
    start(store, 20, most=3)
    for _ in range(3):
        require_beginning(claim_attempt(store, fresh=False), most=3)
    with pytest.raises(UserError, match=r"crashed 4 times in a row .* before they had loaded") as caught:
        require_beginning(claim_attempt(store, fresh=False), most=3)
    assert caught.value.code == ExitCode.NO_PROGRESS


def test_a_crash_after_progress_never_ends_a_run_before_it_begins(store: LocalStorage) -> None:
    for step in range(0, 100, 10):
        mine = claim_attempt(store, fresh=False)
        require_beginning(mine, most=1)
        begin_at(store, mine, step, most=1)


def test_crash_limit_can_be_raised(store: LocalStorage) -> None:
    start(store, 20, most=1)
    with pytest.raises(UserError, match="crashed 1 times"):
        start(store, 20, most=1)
    start(store, 20, most=5)
    assert read_attempts(store).start_step == 20


def test_without_a_limit_nothing_is_given_up(store: LocalStorage) -> None:
    for _ in range(30):
        start(store, 20, most=0)


@pytest.mark.parametrize("ended", ["preempted", "done"])
def test_preempted_start_is_not_a_crash(store: LocalStorage, ended: str) -> None:
    for _ in range(5):
        note_end(store, start(store, 20), ended)
    assert read_attempts(store).without_progress == 0


def test_a_checkpoint_between_crashes_is_progress(store: LocalStorage) -> None:
    for step in (0, 0, 10, 10, 20, 20, 10):  # the last: the newest was damaged
        start(store, step, most=2)


def test_fresh_start_resets_the_crash_count(store: LocalStorage) -> None:
    start(store, 0, most=2)
    start(store, 0, most=2)
    start(store, 0, most=2, fresh=True)
    assert read_attempts(store).without_progress == 0


@settings(max_examples=50)
@given(ends=st.lists(st.sampled_from(["crash", "preempted", "done", "progress"]), max_size=12))
def test_only_crashes_in_a_row_at_one_step_are_counted(ends: list[str]) -> None:
    step = row = 0
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        store = LocalStorage(folder)
        for end in ends:
            mine = start(store, step, most=0)
            assert read_attempts(store).without_progress == row
            row = row + 1 if end == "crash" else 0
            if end == "progress":
                step += 1
            elif end != "crash":
                note_end(store, mine, end)


def test_new_attempt_outranks_all_saved_checkpoints(store: LocalStorage) -> None:
    store.write("checkpoints/0007-00000010-abc/node-0.json", b"{}")
    assert claim_attempt(store, fresh=False).attempt == 8


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"attempt": 1, "of_the_future": 2}', b"\xff"])
def test_damaged_attempts_file_is_reported(store: LocalStorage, content: bytes) -> None:
    store.write("checkpoints/ATTEMPTS.json", content)
    with pytest.raises(UserError, match=r"ATTEMPTS\.json is damaged") as caught:
        claim_attempt(store, fresh=False)
    assert caught.value.code == ExitCode.CHECKPOINT_CORRUPT
    assert store.read("checkpoints/ATTEMPTS.json") == content


@pytest.mark.parametrize(
    ("name", "attempt"),
    [
        ("0012-00000300-0a1b", 12),
        ("12345-00000300-0a1b", 12345),
        ("global_step9", -1),
        ("0001-9-a", -1),
        ("LATEST", -1),
    ],
)
def test_attempt_is_parsed_from_the_name(name: str, attempt: int) -> None:
    assert attempt_of(name) == attempt


def test_attempts_of_a_later_version_are_refused_and_stay(store: LocalStorage) -> None:
    """Written again without the field, they would give up or resume other checkpoints."""
    content = seal({**asdict(Attempts(attempt=3, fresh_from=2)), "of_the_future": 1})
    store.write("checkpoints/ATTEMPTS.json", content)
    for fresh in (False, True):  # nor does resume=never help: the number of the next start is read there
        with pytest.raises(ConfigError, match="of_the_future") as refused:
            claim_attempt(store, fresh=fresh)
        assert (
            refused.value.fix == "continue with the vlmpipe that started the run, or start a new run (another run id)"
        )
    assert store.read("checkpoints/ATTEMPTS.json") == content
