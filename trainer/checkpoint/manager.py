"""Checkpoints of one attempt of the training job: claim, resume, save, close."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

from vlmpipe.trainer.checkpoint.async_saver import CheckpointSaver
from vlmpipe.trainer.checkpoint.attempts import (
    Attempts,
    begin_at,
    claim_attempt,
    note_end,
    order_of,
    read_attempts,
    require_beginning,
    step_of,
)
from vlmpipe.trainer.checkpoint.commit import PROGRAM, committed, settle_other_trainer, was_uncommitted
from vlmpipe.trainer.checkpoint.failed_saves import FailedSaves
from vlmpipe.trainer.checkpoint.manifest import signing_key
from vlmpipe.trainer.checkpoint.mirror.background import BackgroundMirror, MirrorLag
from vlmpipe.trainer.checkpoint.mirror.copies import mirror_of
from vlmpipe.trainer.checkpoint.random_states import have_one_layout, seed_random_states
from vlmpipe.trainer.checkpoint.resume import Resumed, resume
from vlmpipe.trainer.checkpoint.retention import Retention
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.agreement import agree, on_any, on_first
from vlmpipe.trainer.distributed.data_parallel_rank import replica_of
from vlmpipe.trainer.distributed.heartbeats import now_doing
from vlmpipe.trainer.distributed.process import ProcessContext, StopRequest
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.optimizer.build import rate_factor
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.records.validations import Validations
from vlmpipe.trainer.storage.base import Storage, join_uri
from vlmpipe.trainer.strategies.base import Strategy

POLL_S = 1.0  # between two looks at a stop request
COMMIT_MARGIN_S = 2.0  # the time of the last save only estimates that of the next


class Checkpoints:
    """Resumes and saves for the training loop. Methods are collective and raise the same errors on all ranks."""

    def __init__(
        self, job: JobConfig, store: Storage, strategy: Strategy, record: CommitRecord, worker: ProcessContext
    ) -> None:
        self._store, self._strategy, self._worker, self._job = store, strategy, worker, job
        self._settings, self._key = job.checkpoint, signing_key(job.checkpoint)
        self._mirror = mirror_of(job)
        self._mine = on_first(worker, self._claim)
        self._record = dataclasses.replace(record, attempt=self._mine.attempt)
        self._name = ""
        self._last: CommitRecord | None = None  # saved or to be saved again
        self._is_left_out = False  # the last one, for lack of time
        self._failures = FailedSaves(self._settings.max_s_without_commit, quiet=not worker.is_first)
        self._copies: BackgroundMirror | None = None  # of rank 0, once `resume` has read the stores
        self._saver = CheckpointSaver(
            store,
            strategy,
            worker,
            Retention.of(job),
            self._failures,
            async_save=self._settings.async_save,
            key=self._key,
            on_commit=self._mirror_it,
        )

    @property
    def start(self) -> Attempts:
        """This start of the job."""
        return self._mine

    def resume(self) -> Resumed | None:
        """Load the newest good checkpoint, unless there is none or this start gives up those before it."""
        now_doing("resuming")
        resumed = None
        if self._mine.fresh_from < self._mine.attempt:  # else this start has given up all before it
            stores = [self._store, *([self._mirror] if self._mirror else [])]
            resumed = resume(stores, self._strategy, self._record, self._worker, key=self._key)
        step = resumed.checkpoint.record.step if resumed else 0
        if resumed and not have_one_layout(resumed.checkpoint.record, self._record):
            train = self._job.train
            seed_random_states(train.seed, replica_of(train, self._worker), step=step)
        self._name = resumed.checkpoint.name if resumed else ""
        most = self._settings.max_starts_without_progress
        on_first(self._worker, lambda: begin_at(self._store, self._mine, step, most=most))
        if self._mirror and self._worker.is_first:
            self._copies = self._open_copies(self._mirror)
        now_doing("training")
        return resumed

    @property
    def wants_again(self) -> bool:
        """On rank 0, whether a save has failed and it is time for another; all ranks must `save` at the same step."""
        return self._saver.wants_again

    @property
    def committed(self) -> str:
        """Name of the newest checkpoint that all ranks know to be committed; "" for none."""
        return self._saver.known or self._name

    def is_committed(self, name: str) -> bool:
        """Return whether the checkpoint is there. Collective. A mirror that cannot be read may have it."""

        def look() -> bool:
            if name in committed(self._store):
                return True
            if self._mirror is None:
                return False
            with contextlib.suppress(UserError):
                return name in committed(self._mirror)
            return True

        return on_first(self._worker, look)

    def save(
        self,
        step: int,
        epoch: int,
        sequences_consumed: int,
        loss: float,
        stop: StopRequest,
        validations: Validations | None = None,
    ) -> None:
        """Begin to save this step, unless a stop request leaves too little time.

        What became of the save before is known then: training continues after one that failed for a reason that passes.
        """
        self._last = dataclasses.replace(
            self._record,
            step=step,
            epoch=epoch,
            sequences_consumed=sequences_consumed,
            loss=loss,
            learning_rate=self._learning_rate(step),
            validations=validations,
        )
        self._is_left_out = agree(self._no_time_left(stop))
        if not self._is_left_out:
            self._saver.finish()
            if validations and self.committed:
                validations = validations.committed(self.committed, step_of(self.committed))
            self._last = dataclasses.replace(self._last, validations=validations)
            self._saver.save(self._last)
        elif self._worker.is_first:
            message = f"no time to save step {step} before the machine is preempted: the last checkpoint is used"
            print(f"train: {message}", flush=True)

    @contextlib.contextmanager
    def finished_before_errors(self) -> Iterator[None]:
        """Finish the save that is under way before an error of this block, on this rank, ends the job."""
        try:
            yield
        except Exception:
            self._saver.finish_before_error()
            raise

    def settle(self, stop: StopRequest) -> bool:
        """Wait for the last save's COMMIT; save again, as often as it fails.

        False if a stop request came first, or left no time to save: the next start makes those steps again.
        """
        self._saver.finish()
        if self._is_left_out:
            return False
        while self._saver.has_failed and self._last:
            while agree(self._failures.is_waiting) and not on_any(self._worker, stop.requested):
                time.sleep(POLL_S)
            if on_any(self._worker, stop.requested):
                return False
            self._saver.save(self._last)
            self._saver.finish()
        return True

    def finish(self, ended: str) -> str:
        """Wait for the last save and record how this start ended. Returns the newest checkpoint's name."""
        saved = self._saver.finish()
        if self._saver.has_failed and self._last and self._worker.is_first:
            self._failures.warn(f"step {self._last.step} is not saved before the stop: the last checkpoint counts")
        on_first(self._worker, lambda: note_end(self._store, self._mine, ended))
        return saved.name or self._name

    def notes(self, resumed: Resumed | None) -> list[str]:
        """Notes on the resume for people."""
        return resumed.notes(self._record, self._learning_rate(resumed.checkpoint.record.step)) if resumed else []

    def take_warnings(self) -> list[str]:
        """Warnings about saves since the last call, printed already; empty on other ranks than 0."""
        return self._failures.take_warnings()

    def mirror_lag(self, step: int) -> MirrorLag | None:
        """How far the mirror lags behind `step`; None on other ranks than 0 and without a mirror."""
        return self._copies.lag(step) if self._copies else None

    def _learning_rate(self, step: int) -> float:
        """Return the learning rate of the step after `step`."""
        train, total_steps = self._job.train, self._record.total_steps
        return train.optimizer.learning_rate * rate_factor(train, min(step, total_steps), total_steps)

    def _open_copies(self, mirror: Storage) -> BackgroundMirror:
        copied: list[str] = []
        with contextlib.suppress(UserError):  # reported by the first copy
            # Later ones were passed over: they are damaged.
            copied = [name for name in committed(mirror) if order_of(name) <= order_of(self._name)]
        copies = BackgroundMirror(
            self._store,
            mirror,
            Retention.of(self._job),
            copied_step=step_of(copied[-1]) if copied else 0,
            key=self._key,
        )
        if self._name and self._name not in copied and not was_uncommitted(self._store, self._name):
            copies.submit(self._name)  # the end of an earlier start cut this copy off
        return copies

    def _mirror_it(self, name: str) -> None:
        if self._copies:
            self._copies.submit(name)

    def _claim(self) -> Attempts:
        above = 0
        if self._mirror:
            with contextlib.suppress(UserError):  # an unreachable mirror is reported by `resume`
                above = read_attempts(self._mirror).attempt
        run, fresh = self._job.run, self._job.train.resume == "never"
        settle_other_trainer(
            join_uri(run.run_uri, PROGRAM), "a program of your own", fresh=fresh, submission=run.submission_name
        )
        attempts = claim_attempt(self._store, fresh=fresh, submission=run.submission_name, above=above)
        require_beginning(attempts, most=self._settings.max_starts_without_progress)
        return attempts

    def _no_time_left(self, stop: StopRequest) -> bool:
        """Return whether less is left of the notice than the last save took. The first save is always tried."""
        last_s = self._saver.saved.seconds
        if stop.requested_at is None or last_s is None:
            return False
        left_s = self._settings.preemption_notice_s - (time.monotonic() - stop.requested_at)
        return last_s + COMMIT_MARGIN_S > left_s
