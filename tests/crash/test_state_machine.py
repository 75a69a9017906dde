"""Any order of saves, crashes, zombies, clearing and damage: what is resumed is whole, and the newest that is."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from tests.conftest import MEMORY
from tests.crash.conftest import IMPATIENT
from tests.fakes.gcs.server import FakeGcs
from tests.support.crash.cases import FULL, case
from tests.support.crash.world import Meanwhile, flip, half, tamper, upload
from tests.support.trainer.checkpoints import newest_good, record
from vlmpipe.trainer.checkpoint import commit as protocol
from vlmpipe.trainer.checkpoint import retention as clearing
from vlmpipe.trainer.checkpoint.attempts import Attempts, begin_at, claim_attempt, note_end, read_attempts
from vlmpipe.trainer.checkpoint.commit import FOLDER, DamagedError, Listing, checkpoint_name, reject
from vlmpipe.trainer.checkpoint.fault_points import POINTS
from vlmpipe.trainer.checkpoint.retention import Retention, delete_old, sweep_leftovers
from vlmpipe.trainer.checkpoint.verified_files import verify
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.local import LocalStorage

IN_PROTOCOL = POINTS[POINTS.index("first file uploaded") :]
FILES = ("deep/shard-0", "deep/shard-1", "small-0", "node-0.json", "node-1.json", "COMMIT")
DAMAGES = {"flip": flip, "truncate": half}


class KilledError(BaseException):
    """Stands for SIGKILL: nothing of the protocol may catch it."""


class Checkpoints(RuleBasedStateMachine):
    """The protocol beside a model of it: which checkpoints are committed, which of them are whole, and who starts."""

    pending = Bundle("pending")  # names whose upload has begun and that are not committed

    def make_store(self) -> Storage:
        return LocalStorage(self.folder / "run")

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.store = self.make_store()
        self.attempts = Attempts()  # the model of ATTEMPTS.json
        self.committed: dict[str, bool] = {}  # name -> whole
        self.uploaded: dict[str, int] = {}  # pending name -> nodes that are done
        self.nonces = iter(range(10**6))

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    # -- starts --

    @rule(fresh=st.booleans() if FULL else st.sampled_from([False, False, True]))
    def start(self, fresh: bool) -> None:
        found = claim_attempt(self.store, fresh=fresh)
        self.claimed(fresh)
        assert found == self.attempts
        step, expected = self.resumable_step(), self.attempts
        if step is None:
            return  # all that counts is damaged: a start ends here with 74
        crashes = expected.without_progress if expected.start_step in (None, step) else 0
        self.note(start_step=step, without_progress=crashes)
        begin_at(self.store, found, step, most=0)

    @precondition(lambda self: self.attempts.attempt)
    @rule(ended=st.sampled_from(["done", "preempted"]))
    def end(self, ended: str) -> None:
        note_end(self.store, self.attempts, ended)
        self.note(ended=ended)

    # -- saves --

    @precondition(lambda self: self.attempts.attempt)
    @rule(target=pending, behind=st.integers(0, 2), step=st.integers(1, 9), nodes=st.integers(0, 2))
    def upload_part(self, behind: int, step: int, nodes: int) -> str:
        """By the present start or by a zombie of an earlier one, all of it or the part before a crash."""
        name = checkpoint_name(max(1, self.attempts.attempt - behind), step, f"n{next(self.nonces)}")
        upload(self.store, self.folder, name, step, nodes=range(nodes))
        self.uploaded[name] = nodes
        return name

    @precondition(lambda self: self.attempts.attempt)
    @rule(step=st.integers(1, 9))
    def save(self, step: int) -> None:
        self.finish_and_commit(self.upload_part(behind=0, step=step, nodes=2))

    @precondition(lambda self: self.attempts.attempt)
    @rule(step=st.integers(1, 9), point=st.sampled_from(IN_PROTOCOL), keep=st.integers(1, 2))
    def save_with_a_crash(self, step: int, point: str, keep: int) -> None:
        self.save_and_crash(self.upload_part(behind=0, step=step, nodes=0), point, keep)

    @rule(name=consumes(pending))
    def finish_and_commit(self, name: str) -> None:
        self.upload_rest(name)
        if self.is_current(name):
            protocol.commit(self.store, name, self.record(name))
            self.committed[name] = True
        else:
            with pytest.raises(UserError) as caught:
                protocol.commit(self.store, name, self.record(name))
            assert caught.value.code == ExitCode.SUPERSEDED

    @rule(name=consumes(pending))
    def commit_without_a_part(self, name: str) -> None:
        if self.uploaded[name] < 2:
            with pytest.raises(UserError):
                protocol.commit(self.store, name, self.record(name))

    @rule(name=consumes(pending))
    def commit_twice(self, name: str) -> None:
        """As after an answer that was lost."""
        if self.is_current(name):
            self.upload_rest(name)
            for _ in range(2):
                protocol.commit(self.store, name, self.record(name))
            self.committed[name] = True

    @rule(name=consumes(pending), fresh=st.booleans())
    def commit_while_another_starts(self, name: str, fresh: bool) -> None:
        """The zombie's check has passed, its COMMIT lands after the next start has claimed."""
        if self.is_current(name):
            self.upload_rest(name)
            store: Any = Meanwhile(self.store, "create", "COMMIT", lambda: claim_attempt(self.store, fresh=fresh))
            protocol.commit(store, name, self.record(name))
            assert store.happened
            self.claimed(fresh)
            self.committed[name] = True

    @rule(name=consumes(pending), point=st.sampled_from(IN_PROTOCOL), keep=st.integers(1, 3))
    def save_and_crash(self, name: str, point: str, keep: int) -> None:
        """The whole of a save's end with a SIGKILL at a point that it may or may not come to."""
        if not self.is_current(name):
            return
        with killed_at(point):
            self.upload_rest(name)
            protocol.commit(self.store, name, self.record(name))
            sweep_leftovers(self.store, self.attempts.attempt)
            delete_old(self.store, Retention(keep), newest=name)
        names = {info.name for info in self.store.list(FOLDER)}
        if f"{FOLDER}/{name}/COMMIT" in names:
            self.committed[name] = True
            self.cleared(name)
        else:
            assert POINTS.index(point) <= POINTS.index("before COMMIT")

    # -- clearing --

    @precondition(lambda self: self.newest_whole() is not None)
    @rule(data=st.data(), keep=st.integers(1, 3), every=st.sampled_from([0, 0, 2, 3]), best=st.booleans())
    def gc(self, data: st.DataObject, keep: int, every: int, best: bool) -> None:
        """By whoever has just committed `newest`, a zombie perhaps: to it, it is the newest, and it is whole."""
        whole = sorted(name for name in self.committed if self.committed[name] and self.counts(name))
        newest = data.draw(st.sampled_from(whole))
        before = Listing.read(self.store).committed
        try:
            deleted = delete_old(self.store, Retention(keep, every, best), newest=newest)
        except UserError as error:
            assert error.code == ExitCode.SUPERSEDED and not self.is_current(newest)
            assert Listing.read(self.store).committed == before
            return
        assert self.is_current(newest) or not deleted
        assert all(name < newest for name in deleted)
        self.require_gone(deleted)

    @precondition(lambda self: self.attempts.attempt)
    @rule()
    def sweep(self) -> None:
        given_up = {name for name in self.committed if not self.counts(name)}
        swept = sweep_leftovers(self.store, self.attempts.attempt)
        assert {name for name in self.committed if name in swept} <= given_up
        self.require_gone(swept)

    # -- damage --

    @precondition(lambda self: any(self.committed.values()))
    @rule(data=st.data(), file=st.sampled_from(FILES), how=st.sampled_from(["flip", "truncate", "delete"]))
    def damage(self, data: st.DataObject, file: str, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, whole in self.committed.items() if whole)))
        if how != "delete":
            tamper(self.store, name, file, DAMAGES[how])
            self.committed[name] = False
            return
        self.store.delete(f"{FOLDER}/{name}/{file}")
        if file == "COMMIT":
            del self.committed[name]  # without it nothing exists
        else:
            self.committed[name] = False

    @precondition(lambda self: not all(self.committed.values()))
    @rule()
    def note_damage(self) -> None:
        """What a resume leaves beside the ones that it passed over."""
        for name in Listing.read(self.store).committed:
            if not self.committed[name]:
                reject(self.store, name, "damaged")

    # -- the law --

    @invariant()
    def newest_good_is_the_newest_that_is_whole(self) -> None:
        if not hasattr(self, "store"):
            return
        counting = [name for name in self.committed if self.counts(name)]
        whole = self.newest_whole()
        if counting and whole is None:
            with pytest.raises(UserError) as caught:
                newest_good(self.store)
            assert caught.value.code == ExitCode.CHECKPOINT_CORRUPT
            return
        found, passed_over = newest_good(self.store)
        assert (found.name if found else None) == whole
        assert len(passed_over) == len([name for name in counting if whole is not None and name > whole])

    @invariant()
    def the_count_of_starts_is_right(self) -> None:
        if hasattr(self, "store"):
            assert read_attempts(self.store) == self.attempts

    @invariant()
    def what_has_a_commit_is_whole_unless_damaged(self) -> None:
        if not hasattr(self, "store"):
            return
        for name in Listing.read(self.store).committed:
            if self.committed[name]:
                assert verify(self.store, name).record.step == int(name.split("-")[1])
            else:
                with pytest.raises(DamagedError):
                    verify(self.store, name)

    # -- the model --

    def claimed(self, fresh: bool) -> None:
        before = self.attempts
        number = before.attempt + 1
        crashed = before.attempt and not before.ended and not fresh
        self.note(
            attempt=number,
            fresh_from=number if fresh else before.fresh_from,
            without_progress=before.without_progress + 1 if crashed else 0,
            ended="",
        )

    def note(self, **changes: Any) -> None:
        self.attempts = Attempts(**{**vars(self.attempts), **changes})

    def counts(self, name: str) -> bool:
        return int(name.split("-")[0]) >= self.attempts.fresh_from

    def is_current(self, name: str) -> bool:
        return int(name.split("-")[0]) == self.attempts.attempt

    def newest_whole(self) -> str | None:
        return max((name for name, whole in self.committed.items() if whole and self.counts(name)), default=None)

    def resumable_step(self) -> int | None:
        whole = self.newest_whole()
        if whole is None:
            return None if any(self.counts(name) for name in self.committed) else 0
        return int(whole.split("-")[1])

    def record(self, name: str) -> CommitRecord:
        attempt, step, _ = name.split("-")
        return record(int(attempt), int(step), loss=1 / int(step))

    def upload_rest(self, name: str) -> None:
        """The nodes that have not sent theirs; all again, when it was swept meanwhile."""
        upload(self.store, self.folder, name, int(name.split("-")[1]), nodes=range(self.uploaded[name], 2))
        self.uploaded[name] = 2

    def cleared(self, newest: str) -> None:
        """Clearing that was killed on its way may have taken older ones, and what was given up."""
        there = {info.name.split("/")[1] for info in self.store.list(FOLDER) if info.name.endswith("/COMMIT")}
        gone = [name for name in self.committed if name not in there]
        assert all(name < newest for name in gone)
        for name in gone:
            del self.committed[name]
        folders = Listing.read(self.store).folders
        self.uploaded |= {name: 0 for name in self.uploaded if name not in folders}

    def require_gone(self, names: list[str]) -> None:
        for name in names:
            assert not self.store.list(f"{FOLDER}/{name}")
            self.committed.pop(name, None)
            self.uploaded[name] = 0


class CheckpointsOnGcs(Checkpoints):
    """The same on the strict fake server."""

    def make_store(self) -> Storage:
        from vlmpipe.trainer.storage.gcs import GcsStorage

        self.server = FakeGcs(buckets=["bucket"], page_size=5).__enter__()
        self.cache = mock.patch.dict("os.environ", {"VLMPIPE_CACHE_DIR": str(self.folder / "cache")})
        self.cache.start()
        return GcsStorage("gs://bucket/run", client=self.server.client(), retry=IMPATIENT)

    def teardown(self) -> None:
        if hasattr(self, "server"):
            self.server.__exit__()
            self.cache.stop()
        super().teardown()


@contextmanager
def killed_at(point: str) -> Iterator[None]:
    def die(here: str) -> None:
        if here == point:
            raise KilledError

    with mock.patch.object(protocol, "crash_point", die), mock.patch.object(clearing, "crash_point", die):
        try:
            yield
        except KilledError:
            return


def settings_of(examples: int, steps: int) -> settings:
    """The short form says that there is a fault; the full one takes its time to find the shortest way to it."""
    phases = [phase for phase in Phase if FULL or phase is not Phase.shrink]
    return settings(
        phases=phases,
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


@case(
    "any order",
    "saves, crashes at any point, zombies, deletion, cleanup, fresh starts and damage, in any order (hypothesis)",
    "the resumed checkpoint verifies and is the newest intact one of the valid starts; else 74",
)
def test_any_order() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Checkpoints, settings=settings_of(120 if FULL else 15, 40 if FULL else 30))


@pytest.mark.skipif(not FULL, reason="make crash-matrix runs it on the fake server too")
@case("any order", "the same on Cloud Storage", "the same")
def test_any_order_on_gcs() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(CheckpointsOnGcs, settings=settings_of(10, 25))
