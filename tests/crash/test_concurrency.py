"""Several writers, readers and clearers at once, in chosen interleavings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.crash.cases import case
from tests.support.crash.world import (
    Meanwhile,
    after_a_fault,
    flip,
    loaded,
    run_once,
    save,
    tamper,
    two_committed,
    upload,
)
from tests.support.trainer.checkpoints import newest_good, record
from vlmpipe.trainer.checkpoint.attempts import FILE, begin_at, claim_attempt, note_end, read_attempts
from vlmpipe.trainer.checkpoint.commit import FOLDER, checkpoint_name, commit, committed
from vlmpipe.trainer.checkpoint.retention import Retention, delete_old, sweep_leftovers
from vlmpipe.trainer.checkpoint.verified_files import fetch_folder
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import write_record


@case("concurrency", "two writers save the same step", "both are whole; one of them is loaded, always the same")
def test_two_writers_of_a_step(store: Storage, scratch: Path) -> None:
    two_committed(store, scratch)
    names = [checkpoint_name(1, 3, nonce) for nonce in ("a", "b")]
    for node in range(2):
        for name in names:
            upload(store, scratch, name, 3, nodes=range(node, node + 1))
    for name in names:
        commit(store, name, record(1, 3))
    assert {loaded(store, scratch).name for _ in range(2)} == {names[1]}
    after_a_fault(store, scratch, allowed={names[1]})


@case("concurrency", "an older step is committed late", "the newer one stays the newest and is not deleted")
def test_a_late_older_writer(store: Storage, scratch: Path) -> None:
    two_committed(store, scratch)
    late = checkpoint_name(1, 3, "a")
    upload(store, scratch, late, 3)
    newest = save(store, scratch, 4)
    commit(store, late, record(1, 3))
    delete_old(store, Retention(1), newest=late)
    assert newest in committed(store)
    after_a_fault(store, scratch, allowed={newest})


@case("concurrency", "a zombie of an earlier start commits after a later start has begun", "refused (72)")
def test_a_zombie_is_refused(store: Storage, scratch: Path) -> None:
    _, old = two_committed(store, scratch)
    name = checkpoint_name(1, 3, "z")
    upload(store, scratch, name, 3)
    claim_attempt(store, fresh=False)
    with pytest.raises(UserError, match="start 2 has taken over") as caught:
        commit(store, name, record(1, 3))
    assert caught.value.code == ExitCode.SUPERSEDED
    assert after_a_fault(store, scratch, allowed={old}) == old


@case(
    "concurrency",
    "a zombie passes the check, the later start begins and saves, and the zombie's COMMIT lands",
    "the later start's checkpoint stays the newest, though its step is lower",
)
def test_a_zombie_that_wins_the_race_never_outranks(store: Storage, scratch: Path) -> None:
    two_committed(store, scratch)
    name = checkpoint_name(1, 9, "z")
    upload(store, scratch, name, 9)
    saved: list[str] = []
    racing = Meanwhile(store, "create", f"{name}/COMMIT", lambda: saved.append(save_as_next_start(store, scratch)))
    commit(racing, name, record(1, 9))  # type: ignore[arg-type]
    assert racing.happened and name in committed(store)
    with pytest.raises(UserError, match="start 2 has taken over"):
        delete_old(store, Retention(1), newest=name)  # the zombie would clear up too
    assert loaded(store, scratch).name == saved[0] > name
    after_a_fault(store, scratch, allowed=set(saved))


def save_as_next_start(store: Storage, scratch: Path) -> str:
    return save(store, scratch, 3, attempt=claim_attempt(store, fresh=False).attempt)


@case(
    "concurrency",
    "a zombie's COMMIT lands after a fresh start (resume=never)",
    "it is not resumed, and is deleted",
)
def test_a_zombie_of_a_future_that_was_given_up(store: Storage, scratch: Path) -> None:
    two_committed(store, scratch)
    name = checkpoint_name(1, 9, "z")
    upload(store, scratch, name, 9)
    racing = Meanwhile(store, "create", "COMMIT", lambda: claim_attempt(store, fresh=True))
    commit(racing, name, record(1, 9))  # type: ignore[arg-type]
    assert newest_good(store) == (None, [])
    newest = run_once(store, scratch)
    assert loaded(store, scratch).record.step == 1 and committed(store) == [newest]
    assert not store.list(f"checkpoints/{name}")


@case(
    "concurrency",
    "a zombie deletes old checkpoints after a later start resumed from an older one because the newest was damaged",
    "refused (72), nothing is deleted; the later start's checkpoint stays",
)
def test_a_zombie_may_not_clear_up(store: Storage, scratch: Path) -> None:
    _, old = two_committed(store, scratch)
    damaged = save(store, scratch, 3)
    tamper(store, damaged, "deep/shard-0", flip)
    claim_attempt(store, fresh=False)
    before = [(info.name, info.version) for info in store.list(FOLDER)]
    with pytest.raises(UserError, match="start 2 has taken over") as caught:
        delete_old(store, Retention(1), newest=damaged)
    assert caught.value.code == ExitCode.SUPERSEDED
    assert [(info.name, info.version) for info in store.list(FOLDER)] == before
    after_a_fault(store, scratch, allowed={old}, damaged=frozenset({damaged}))


@case(
    "concurrency",
    "a later start takes over while a zombie deletes old checkpoints",
    "the zombie stops before its next deletion (72); the later start resumes from the zombie's newest",
)
def test_taking_over_from_a_zombie_that_clears_up(store: Storage, scratch: Path) -> None:
    first, second = two_committed(store, scratch)
    newest = save(store, scratch, 3)
    racing: Any = Meanwhile(store, "delete", f"{first}/small-0", lambda: claim_attempt(store, fresh=False))
    with pytest.raises(UserError, match="start 2 has taken over"):
        delete_old(racing, Retention(1), newest=newest)
    assert racing.happened and committed(store) == [second, newest]
    after_a_fault(store, scratch, allowed={newest})


@case("concurrency", "old ones are deleted while another is uploaded", "the upload is untouched and commits")
def test_clearing_during_an_upload(store: Storage, scratch: Path) -> None:
    _, old = two_committed(store, scratch)
    name = checkpoint_name(1, 3, "a")

    def clear() -> None:
        delete_old(store, Retention(1), newest=old)
        sweep_leftovers(store, 1)

    upload(store, scratch, name, 3, nodes=range(1))
    racing: Any = Meanwhile(store, "upload", "shard-1", clear)
    upload(racing, scratch, name, 3, nodes=range(1, 2))
    commit(store, name, record(1, 3))
    assert racing.happened
    after_a_fault(store, scratch, allowed={name})


@case(
    "concurrency",
    "the next start deletes the folder that a zombie is still uploading",
    "what the zombie commits in the race is skipped; the later start's is loaded",
)
def test_sweeping_under_a_zombie(store: Storage, scratch: Path) -> None:
    _, old = two_committed(store, scratch)
    name = checkpoint_name(1, 3, "z")
    upload(store, scratch, name, 3)
    racing: Any = Meanwhile(
        store, "create", "COMMIT", lambda: sweep_leftovers(store, claim_attempt(store, fresh=False).attempt)
    )
    commit(racing, name, record(1, 3))
    assert racing.happened
    found, passed_over = newest_good(store)
    assert found is not None and found.name == old and len(passed_over) == 1
    after_a_fault(store, scratch, allowed={old}, damaged=frozenset({name}))


@case(
    "concurrency",
    "the checkpoint that a reader has chosen is deleted right before it reads {}",
    "the reader looks again and takes the newer one; no false alarm",
    ending=("COMMIT", "node-0.json", "shard-0"),
)
def test_clearing_during_a_restore(ending: str, store: Storage, scratch: Path) -> None:
    newest: list[str] = []

    def move_on() -> None:
        newest.extend(save(store, scratch, step) for step in (3, 4))
        delete_old(store, Retention(1), newest=newest[-1])

    _, chosen = two_committed(store, scratch)
    method = "read_range" if ending == "shard-0" else "read"
    racing: Any = Meanwhile(store, method, f"{chosen}/{'deep/' if method == 'read_range' else ''}{ending}", move_on)
    found, passed_over = newest_good(racing)
    assert racing.happened
    assert found is not None and found.name == newest[-1] and passed_over == []


@case("concurrency", "a checkpoint is deleted between its choice and its download", "an error, and no wrong bytes")
def test_clearing_before_the_download(store: Storage, scratch: Path) -> None:
    _, chosen = two_committed(store, scratch)
    found, _ = newest_good(store)
    assert found is not None
    newest = save(store, scratch, 3)
    delete_old(store, Retention(1), newest=newest)
    with pytest.raises(Exception, match=rf"{chosen}: node-[01].json is missing"):  # they are read at once
        fetch_folder(store, found, scratch / "x")
    after_a_fault(store, scratch, allowed={newest})


@case("concurrency", "two processes delete old checkpoints at once", "the retained ones are whole, the rest is gone")
def test_two_clear_at_once(store: Storage, scratch: Path) -> None:
    names = [save(store, scratch, step, attempt=claim_attempt(store, fresh=False).attempt) for step in (1, 2, 3, 4)]
    racing: Any = Meanwhile(
        store, "delete", f"{names[1]}/deep/shard-0", lambda: delete_old(store, Retention(2), newest=names[-1])
    )
    delete_old(racing, Retention(2), newest=names[-1])
    assert racing.happened and committed(store) == names[2:]
    after_a_fault(store, scratch, allowed={names[-1]})


@case("concurrency", "eight starts claim at once", "each gets its own number; only the highest may commit")
def test_claims_at_once(store: Storage, scratch: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda _: claim_attempt(store, fresh=False).attempt, range(8)))
    assert sorted(claims) == list(range(1, 9)) and read_attempts(store).attempt == 8
    name = checkpoint_name(7, 1, "a")
    upload(store, scratch, name, 1)
    with pytest.raises(UserError, match="start 7 of the run's training, and start 8"):
        commit(store, name, record(7, 1))
    after_a_fault(store, scratch, allowed={save(store, scratch, 1, attempt=8)})


@case("concurrency", "a start begins or ends while a later one has taken over", "it exits with 72 and changes nothing")
def test_notes_of_a_superseded_start(store: Storage, scratch: Path) -> None:
    zombie = claim_attempt(store, fresh=False)
    claim_attempt(store, fresh=False)
    before = read_attempts(store)
    with pytest.raises(UserError) as caught:
        begin_at(store, zombie, 5, most=0)
    note_end(store, zombie, "done")
    assert caught.value.code == ExitCode.SUPERSEDED and read_attempts(store) == before


@case(
    "concurrency",
    "the newest is damaged while the older ones are being deleted",
    "the next save makes the run resumable again",
)
def test_damage_while_clearing(store: Storage, scratch: Path) -> None:
    attempt = claim_attempt(store, fresh=False).attempt
    names = [save(store, scratch, step, attempt=attempt) for step in (1, 2, 3)]
    tamper(store, names[-1], "deep/shard-0", flip)
    newest = save(store, scratch, 4, attempt=attempt)
    delete_old(store, Retention(1), newest=newest)
    assert after_a_fault(store, scratch, allowed={newest}) == newest


@case(
    "concurrency",
    "start 10000 saves after start 9999, whose step is higher",
    "start 10000's is the newest; resuming and retention compare numbers, not text",
)
def test_more_starts_than_digits(store: Storage, scratch: Path) -> None:
    write_record(store, FILE, {"attempt": 9998})
    old = save(store, scratch, 9, attempt=claim_attempt(store, fresh=False).attempt)
    newest = save(store, scratch, 3, attempt=claim_attempt(store, fresh=False).attempt)
    assert newest < old and committed(store) == [old, newest]
    assert loaded(store, scratch).name == newest
    assert delete_old(store, Retention(1), newest=newest) == [old]
    after_a_fault(store, scratch, allowed={newest})
