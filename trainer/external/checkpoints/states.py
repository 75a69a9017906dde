"""Checkpoints of a training program, copied under the commit protocol, and its result, copied in the same way.

The program writes them on the nodes' disks (`vlmpipe.trainer.external.checkpoints.forms`). A copy of the newest one,
of all nodes' files, lies in `<run>/trainer/checkpoints/`, apart from those of our own trainer, and the result in
`<run>/result/checkpoints/`. Neither exists before its COMMIT.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from vlmpipe.trainer.checkpoint.attempts import (
    Attempts,
    begin_at,
    claim_attempt,
    follow_attempt,
    last_attempt,
    note_end,
    require_beginning,
    step_of,
)
from vlmpipe.trainer.checkpoint.commit import (
    PROGRAM,
    Checkpoint,
    Listing,
    checkpoint_name,
    commit,
    committed,
    inspect,
    name_newest,
    settle_other_trainer,
    upload_files,
    upload_node_files,
)
from vlmpipe.trainer.checkpoint.failed_saves import FailedSaves
from vlmpipe.trainer.checkpoint.manifest import signing_key
from vlmpipe.trainer.checkpoint.mirror.background import BackgroundMirror
from vlmpipe.trainer.checkpoint.mirror.copies import mirror_of, newest_good_of, newest_usable_of
from vlmpipe.trainer.checkpoint.retention import Housekeeping, Retention, sweep_leftovers
from vlmpipe.trainer.config.external_trainer import HF_RESULTS
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import UserError, os_errors
from vlmpipe.trainer.external.checkpoints.forms import (
    LATEST,
    STATE_FOLDER,
    Candidate,
    Place,
    Stamp,
    Unfit,
    candidates_in,
    cut_off,
    problem,
    processes_of,
    size_below,
    stamps,
)
from vlmpipe.trainer.external.checkpoints.gathering import POLL_S as GATHERING_POLL_S
from vlmpipe.trainer.external.checkpoints.gathering import Gathering
from vlmpipe.trainer.external.checkpoints.resuming import fetch_state, require_same_model, require_same_processes
from vlmpipe.trainer.external.checkpoints.unfinished import Unfinished
from vlmpipe.trainer.external.follow import STATE
from vlmpipe.trainer.external.platform_folders import SlowFolders
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage, join_uri
from vlmpipe.trainer.storage.file_sums import files_below
from vlmpipe.trainer.storage.file_systems import link_or_copy
from vlmpipe.trainer.storage.outage import patiently, warned

STATES, RESULT = PROGRAM, "result"  # folders of a run
MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".md")
POLL_S = 1.0  # between two looks at a stop, while a failed save waits


def states_of(run_uri: str) -> Storage:
    return open_storage(join_uri(run_uri, STATES))


def results_of(run_uri: str) -> Storage:
    return open_storage(join_uri(run_uri, RESULT))


class SavedStates:
    """The program's checkpoints of one start of the job. On the chief only."""

    def __init__(self, job: JobConfig, record: CommitRecord, folders: Sequence[Path]) -> None:
        self._job, self._folders, self._key = job, list(folders), signing_key(job.checkpoint)
        self._lag_is_said = False
        self._store, self._results = states_of(job.run.run_uri), results_of(job.run.run_uri)
        fresh, most = job.train.resume == "never", job.checkpoint.max_starts_without_progress
        submission = job.run.submission_name
        settle_other_trainer(job.run.run_uri, "vlmpipe's trainer", fresh=fresh, submission=submission)
        # One count: a number of its own would let a start that has both stores' folders supersede itself.
        self._mirror, above = mirror_of(job, STATES), last_attempt(self._results)
        if self._mirror:
            with contextlib.suppress(UserError):  # an unreachable mirror is reported by `resume`
                above = max(above, last_attempt(self._mirror))
        self._mine: Attempts = claim_attempt(self._store, fresh=fresh, submission=submission, above=above)
        follow_attempt(self._results, self._mine)
        require_beginning(self._mine, most=most)
        self._record = dataclasses.replace(record, attempt=self._mine.attempt)
        self._failures = FailedSaves(job.checkpoint.max_s_without_commit)
        self._housekeeping = Housekeeping(
            self._store, Retention(job.train.keep_checkpoints), key=self._key, warn=self._failures.warn
        )
        self._seen: dict[Place, tuple[Stamp, ...]] = {}  # files, when it was looked at last
        # What folders that outlast a start hold from the starts before.
        self._before = dict(self._looks())
        self._left_out: dict[Place, tuple[Stamp, ...]] = {}  # files that other nodes did not complete
        self._unfinished = Unfinished(self._failures.warn)
        self._slow = SlowFolders(self._folders)
        self._gathering: Gathering | None = None
        self._copies: BackgroundMirror | None = None
        self.newest_step = 0  # of the checkpoints, 0 without any
        for store in (self._store, self._results):
            sweep_leftovers(store, self._mine.attempt)

    @property
    def start(self) -> Attempts:
        """This start of the job."""
        return self._mine

    @property
    def attempt(self) -> int:
        return self._mine.attempt

    def resume(self, folder: Path) -> tuple[Checkpoint | None, Storage, list[str]]:
        """The newest good checkpoint, its store, and why newer ones were passed over. A copy is in `folder` then."""
        passed_over: list[str] = []

        def fetch(store: Storage, name: str, listing: Listing) -> tuple[Checkpoint, Storage]:
            checkpoint, files = inspect(store, name, listing, key=self._key)
            require_same_model(checkpoint, self._record)
            require_same_processes(checkpoint, processes_of(files), self._record.world_size)
            fetch_state(store, checkpoint, folder)
            return checkpoint, store

        stores = [self._store, *([self._mirror] if self._mirror else [])]
        checkpoint, store = newest_usable_of(stores, fetch, passed_over) or (None, self._store)
        self.newest_step = checkpoint.record.step if checkpoint else 0
        begin_at(self._store, self._mine, self.newest_step, most=self._job.checkpoint.max_starts_without_progress)
        if self._mirror:
            self._copies = self._open_copies(self._mirror, checkpoint)
        return checkpoint, store, passed_over

    def _open_copies(self, mirror: Storage, resumed: Checkpoint | None) -> BackgroundMirror:
        copied: list[str] = []
        with contextlib.suppress(UserError):  # reported by the first copy
            copied = committed(mirror)
        step, keep = step_of(copied[-1]) if copied else 0, Retention(self._job.train.keep_checkpoints)
        copies = BackgroundMirror(self._store, mirror, keep, copied_step=step, key=self._key)
        if resumed and resumed.name not in copied:
            copies.submit(resumed.name)  # the end of an earlier start cut this copy off
        return copies

    def save_newest(self) -> None:
        """Copy the newest finished checkpoint, unless that was done before; again, a minute after it failed.

        Finished: whole by the rules of its form, and unchanged since the last look. Raises UserError when no copy has
        been committed for too long.
        """
        if self._copies and (lag := self._copies.lag(self.newest_step)).is_long:
            self._warn_once(lag.warning())
        if not self._failures.is_waiting:
            self._save_newest(ended=False)

    def save_last(self, stopping: Callable[[], bool], *, failed: bool = False) -> None:
        """Copy the newest checkpoint of a program that has ended; again, as often as it fails, until a stop request.

        The other nodes' files are waited for, for a shorter time after a stop request and if the program has `failed`.
        """
        while not self._save_newest(ended=True):
            if self._gathering:
                self._gathering.hurry(failed or stopping())
                time.sleep(GATHERING_POLL_S)
                continue
            while self._failures.is_waiting and not stopping():
                time.sleep(POLL_S)
            if stopping():
                return

    def take_warnings(self) -> list[str]:
        """Warnings about saves since the last call, printed already."""
        return self._failures.take_warnings()

    def _save_newest(self, *, ended: bool) -> bool:
        """Return whether nothing finished is left to save."""
        if self._gathering:
            self._gather(self._gathering)
            return False
        newest = self._newest(ended=ended)
        return newest is None or self._save(newest)

    def _newest(self, *, ended: bool) -> Candidate | None:
        """The newest checkpoint that is whole, as far as this node has it, and changes no more."""
        whole = []
        for candidate in candidates_in(self._folders, without=frozenset() if ended else self._slow.not_due()):
            if isinstance(candidate, Candidate):
                if candidate.step > self.newest_step and (why := self._why_not(candidate, ended=ended)) is not None:
                    if why:
                        self._unfinished.note(candidate.what, candidate.step, why, self._seen.get(candidate.place))
                    else:
                        whole.append(candidate)
            else:
                self._unfinished.note(candidate[0].name, 0, candidate[1], size_below(candidate[0]))
        self._unfinished.tell(self.newest_step, ended=ended)
        return max(whole, key=lambda candidate: candidate.step, default=None)

    def _why_not(self, candidate: Candidate, *, ended: bool) -> str | None:
        """Why a checkpoint is not copied; empty where it is to be, None where nothing is to be said."""
        try:
            files = candidate.place.files(self._folders)
        except Unfit as error:
            return str(error)
        now = stamps(files)
        unchanged, self._seen[candidate.place] = self._seen.get(candidate.place) == now, now
        if not now or now in (self._before.get(candidate.place), self._left_out.get(candidate.place)):
            return None
        if not (unchanged or ended):
            return None
        with contextlib.suppress(OSError):  # it is being deleted
            if self._record.num_nodes > 1:
                return cut_off(files)
            return problem(files, files, self._record.world_size)
        return None

    def _looks(self) -> Iterator[tuple[Place, tuple[Stamp, ...]]]:
        for candidate in candidates_in(self._folders):
            if isinstance(candidate, Candidate):
                with contextlib.suppress(Unfit):
                    yield candidate.place, stamps(candidate.place.files(self._folders))

    def _save(self, candidate: Candidate) -> bool:
        """Copy a checkpoint; False where that failed or waits for other nodes, and is to be tried again."""
        name = checkpoint_name(self.attempt, candidate.step, uuid.uuid4().hex[:8])
        self._housekeeping.before_save()
        try:
            with os_errors(f"reading {candidate.what}"), _copied_files(candidate.place, self._folders) as files:
                upload_files(self._store, name, 0, files, key=self._key)
                if self._record.num_nodes > 1:
                    nodes = range(1, self._record.num_nodes)
                    self._gathering = Gathering.begin(self._store, name, candidate, files, nodes, self.attempt)
                    return False
            self._commit(name, candidate)
        except (UserError, Unfit) as error:
            return self._failed(name, candidate, error)
        return True

    def _gather(self, gathering: Gathering) -> None:
        """Commit once the files of all nodes are there and whole; leave the checkpoint out after a time limit."""
        candidate, name = gathering.candidate, gathering.name
        try:
            why = gathering.lacks(self._folders, self._record.world_size)
            if not why:
                self._commit(name, candidate)
                self._gathering = None
            elif gathering.is_over or stamps(gathering.files) != self._seen[candidate.place]:
                self._gathering = None
                self._housekeeping.failed(name)
                self._left_out[candidate.place] = self._seen[candidate.place]
                if gathering.is_over:
                    self._failures.warn(f"{candidate.what} is not committed: {why}")
        except UserError as error:
            self._gathering = None
            self._failed(name, candidate, error)

    def _commit(self, name: str, candidate: Candidate) -> None:
        record = dataclasses.replace(self._record, step=candidate.step)
        commit(self._store, name, record, key=self._key)
        self.newest_step = candidate.step
        self._failures.committed(candidate.step)
        name_newest(self._store, name, warn=self._failures.warn)
        print(f"train: checkpoint of step {candidate.step} committed as {name}", flush=True)
        self._housekeeping.after_commit(name)
        if self._copies:
            self._copies.submit(name)

    def _failed(self, name: str, candidate: Candidate, error: UserError | Unfit) -> bool:
        """Return whether there is nothing to try again: the program keeps few checkpoints, and has deleted this one."""
        self._housekeeping.failed(name)
        try:
            now = stamps(candidate.place.files(self._folders))
        except Unfit:
            now = ()
        if isinstance(error, Unfit) or now != self._seen[candidate.place]:
            return True
        if ending := self._failures.count(candidate.step, error):
            raise ending from error
        return False

    def _warn_once(self, text: str) -> None:
        if not self._lag_is_said:
            self._failures.warn(text)
        self._lag_is_said = True

    def save_result(self, folder: Path, step: int, kind: str) -> str:
        """Keep the finished model, also where the store is away for a while. Returns its name."""
        name = checkpoint_name(self.attempt, step, uuid.uuid4().hex[:8])
        # The result is the chief's alone.
        record = dataclasses.replace(self._record, step=step, checkpoint_format=kind, num_nodes=1)
        with _result_files(folder, kind) as result_folder:

            def save() -> None:
                upload_node_files(self._results, name, 0, result_folder, key=self._key)
                commit(self._results, name, record, key=self._key)
                name_newest(self._results, name, warn=self._failures.warn)

            patiently("saving the result", save, limit_s=self._job.checkpoint.max_s_without_commit)
        Housekeeping(self._results, Retention(1), key=self._key, warn=self._failures.warn).after_commit(name)
        return name

    def close(self) -> None:
        """Let the other nodes end: nothing is asked of them any more."""
        if self._record.num_nodes > 1:
            with warned("telling the other nodes to end"):
                Gathering.close(self._store, self.attempt)

    def ended(self, how: str) -> None:
        for store in (self._store, self._results):
            note_end(store, self._mine, how)


@contextlib.contextmanager
def _copied_files(place: Place, folders: list[Path]) -> Iterator[Mapping[str, Path]]:
    """This node's files of a checkpoint. `latest` names the tag that is copied, whatever the program saves next."""
    files = place.files(folders)
    if not place.tag:
        yield files
        return
    with tempfile.TemporaryDirectory() as made:
        latest = Path(made, LATEST)
        latest.write_text(place.tag, encoding="utf-8")
        yield {**files, LATEST: latest}


def newest_result(job: JobConfig) -> tuple[Storage, Checkpoint | None, list[str]]:
    """The newest result that verifies, and its store. Raises UserError (74) when none does."""
    return newest_good_of([results_of(job.run.run_uri)], key=signing_key(job.checkpoint))


@contextlib.contextmanager
def _result_files(folder: Path, kind: str) -> Iterator[Path]:
    """Copy the result's files into a folder beside it: no checkpoints, and of a model no pickles and no code."""
    links = folder.parent / f"{folder.name}-{uuid.uuid4().hex[:8]}"
    for name, path in files_below(folder).items():
        of_model = path.suffix in MODEL_SUFFIXES and path.name != STATE
        if any(STATE_FOLDER.fullmatch(part) for part in name.split("/")[:-1]) or (kind in HF_RESULTS and not of_model):
            continue
        (links / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(path, links / name)
    try:
        yield links
    finally:
        shutil.rmtree(links)
