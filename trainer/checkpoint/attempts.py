"""Numbers the attempts (starts) of a run's training job.

A platform may start a job again while processes of the earlier start still live, cut off from it. Each start takes the
next number by compare-and-swap, checkpoint names begin with it, and readers prefer the highest. So nothing that an
earlier start still commits counts as newer than the later start's checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from pydantic import ConfigDict, TypeAdapter, ValidationError

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.records.record import of_another_version
from vlmpipe.trainer.storage.base import Storage, VersionConflictError
from vlmpipe.trainer.storage.records import seal, unseal

FOLDER = "checkpoints"
FILE = f"{FOLDER}/ATTEMPTS.json"
# Running the run file again in the same folder would meet the same file.
OTHER_VERSION = "continue with the vlmpipe that started the run, or start a new run (another run id)"
_NAME = re.compile(r"(?P<attempt>[0-9]{4,})-(?P<step>[0-9]{8,})-[0-9A-Za-z]+")


@dataclass(frozen=True)
class Attempts:
    """The starts of a run's training job so far."""

    # Each start writes the file again, so a field of a later version that were left out would be lost.
    __pydantic_config__ = ConfigDict(extra="forbid")

    attempt: int = 0  # number of the last start
    fresh_from: int = 0  # first start that may be resumed; resume=never gave up those before
    fresh_for: str = ""  # submission for which that was done
    start_step: int | None = None  # where the last start began
    without_progress: int = 0  # starts in a row before the last one that crashed without a checkpoint
    ended: str = ""  # of the last one: done, preempted, or "" while it runs or after a crash

    def sealed(self) -> bytes:
        """Return the file's bytes."""
        return seal(asdict(self))


_FORM = TypeAdapter(Attempts)


def read_attempts(store: Storage) -> Attempts:
    """The current state; all zero if training never started."""
    try:
        data = store.read(FILE)
    except UserError:
        if store.stat(FILE) is None:
            return Attempts()
        raise
    return _parsed(store, data)


def attempts_of(store: Storage, data: bytes | None) -> Attempts:
    """The state in the file's content; None: there is no file."""
    return Attempts() if data is None else _parsed(store, data)


def claim_attempt(store: Storage, *, fresh: bool, submission: str = "", above: int = 0) -> Attempts:
    """Take the next number, above `above`, a mirror's last one.

    `fresh` gives up the checkpoints of earlier starts, once for each `submission`: when a platform restarts a job, what
    the submission itself has saved counts. Of an empty one, every start gives up those before.
    """
    asked = fresh
    while True:
        recorded, version = _read(store)
        fresh = asked and not begun_by(recorded, submission)
        # The file may be lost or rolled back: checkpoints with a number below the existing ones would not be read.
        number = max(recorded.attempt, _highest_saved(store), above) + 1
        # A start that recorded no end has crashed.
        crashes = recorded.without_progress + 1 if recorded.attempt and not recorded.ended and not fresh else 0
        fresh_from = number if fresh else recorded.fresh_from
        claimed = replace(
            recorded,
            attempt=number,
            fresh_from=fresh_from,
            fresh_for=submission if fresh else recorded.fresh_for,
            without_progress=crashes,
            ended="",
        )
        try:
            store.replace(FILE, claimed.sealed(), version)
            return claimed
        except VersionConflictError:
            continue  # another start took the number


def begun_by(attempts: Attempts, submission: str) -> bool:
    """Return whether a start of this submission has given up the checkpoints before it."""
    return bool(submission) and attempts.fresh_for == submission


def follow_attempt(store: Storage, attempts: Attempts) -> None:
    """Record a start that was claimed in another store, so that both name the same last start.

    Claim it above this store's number. Raises UserError (72) where a later start has been recorded here.
    """
    while True:
        recorded, version = _read(store)
        if recorded.attempt >= attempts.attempt:
            raise _superseded(attempts.attempt, recorded.attempt)
        try:
            return store.replace(FILE, attempts.sealed(), version)
        except VersionConflictError:
            continue


def last_attempt(store: Storage) -> int:
    """The highest number of a start, recorded or of a saved folder."""
    return max(_read(store)[0].attempt, _highest_saved(store))


def begin_at(store: Storage, attempts: Attempts, step: int, *, most: int) -> None:
    """Record this start's first step. Raises UserError (70) when `most` starts in a row crashed at the same one."""
    crashes = attempts.without_progress if attempts.start_step in (None, step) else 0
    if most and crashes >= most:
        raise _no_progress(crashes, f"each start was at step {step}")
    _update(store, attempts.attempt, lambda recorded: replace(recorded, start_step=step, without_progress=crashes))


def require_beginning(attempts: Attempts, *, most: int) -> None:
    """Raise UserError (70) when more than `most` starts in a row crashed, the last ones while loading.

    Call it before loading. Otherwise a platform would restart a job that always crashes until its budget is spent.
    """
    if most and attempts.without_progress > most:
        raise _no_progress(attempts.without_progress, "the last ones before they had loaded a checkpoint")


def _no_progress(crashes: int, where: str) -> UserError:
    return UserError(
        f"training crashed {crashes} times in a row without reaching a checkpoint: {where}",
        expected="at least one more checkpoint between crashes",
        fix="read the logs of the crashes (vlmpipe diagnose); after a remedy, raise "
        "checkpoint.max_starts_without_progress or start a new run",
        code=ExitCode.NO_PROGRESS,
    )


def note_end(store: Storage, attempts: Attempts, ended: str) -> None:
    """Record that this start is done, or was preempted, unless a later one has taken over."""
    with contextlib.suppress(UserError):
        _update(store, attempts.attempt, lambda recorded: replace(recorded, ended=ended))


def require_current(store: Storage, attempt: int) -> None:
    """Raise UserError (72) when a later start of the run has taken over."""
    latest = read_attempts(store).attempt
    if latest > attempt:
        raise _superseded(attempt, latest)


def _update(store: Storage, attempt: int, change: Callable[[Attempts], Attempts]) -> None:
    while True:
        recorded, version = _read(store)
        if recorded.attempt != attempt:
            raise _superseded(attempt, recorded.attempt)
        try:
            return store.replace(FILE, change(recorded).sealed(), version)
        except VersionConflictError:
            continue


def _superseded(attempt: int, latest: int) -> UserError:
    return UserError(
        f"this is start {attempt} of the run's training, and start {latest} has taken over",
        expected="to be the only one that trains this run",
        fix="nothing, if the platform restarted the job; else give each run its own run id",
        code=ExitCode.SUPERSEDED,
    )


def _read(store: Storage) -> tuple[Attempts, str]:
    info = store.stat(FILE)
    if info is None:
        return Attempts(), ""
    return _parsed(store, store.read(FILE)), info.version


def _parsed(store: Storage, data: bytes) -> Attempts:
    try:
        content = unseal(data, required=True)
    except ValueError as error:
        raise UserError(
            f"{store.uri(FILE)} is damaged: {error}",
            expected="the count of this run's starts, as JSON",
            fix="restore the file, or delete it if no start had train.resume=never (--fresh)",
            code=ExitCode.CHECKPOINT_CORRUPT,
        ) from error
    try:
        return _FORM.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        raise of_another_version(store.uri(FILE), error, OTHER_VERSION) from error


def _highest_saved(store: Storage) -> int:
    return max(map(attempt_of, store.folders(FOLDER)), default=0)


def attempt_of(name: str) -> int:
    """The start that saved the folder `name`; -1 for a folder of no save."""
    return order_of(name)[0]


def step_of(name: str) -> int:
    """The step at which the folder `name` was saved; -1 for a folder of no save."""
    return order_of(name)[1]


def order_of(name: str) -> tuple[int, int, str]:
    """Sort key of checkpoints: start, step, name. As text, start 10000 would come before 9999."""
    match = _NAME.fullmatch(name)
    return (int(match["attempt"]), int(match["step"]), name) if match else (-1, -1, name)
