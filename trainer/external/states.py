"""Checkpoints of a training program, copied under the commit protocol, and its result, copied in the same way.

The program writes `checkpoint-N` folders on the chief's disk, trainer_state.json in them last, as transformers'
Trainer does. A copy of the newest one lies in `<run>/trainer/checkpoints/`, apart from those of our own trainer, and
the result in `<run>/result/checkpoints/`. Neither exists before its COMMIT.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vlmpipe.trainer.checkpoint.attempts import (
    Attempts,
    begin_at,
    claim_attempt,
    follow_attempt,
    last_attempt,
    note_end,
    require_beginning,
)
from vlmpipe.trainer.checkpoint.commit import FOLDER as CHECKPOINTS
from vlmpipe.trainer.checkpoint.commit import (
    PROGRAM,
    Checkpoint,
    Listing,
    checkpoint_name,
    commit,
    inspect,
    settle_other_trainer,
    upload_node_files,
)
from vlmpipe.trainer.checkpoint.failed_saves import FailedSaves
from vlmpipe.trainer.checkpoint.manifest import signing_key
from vlmpipe.trainer.checkpoint.mirror.copies import newest_good_of, newest_usable_of
from vlmpipe.trainer.checkpoint.retention import Housekeeping, Retention, sweep_leftovers
from vlmpipe.trainer.checkpoint.verified_files import fetch_folder
from vlmpipe.trainer.config.external_trainer import HF_RESULTS
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ConfigError, UserError, os_errors
from vlmpipe.trainer.external.follow import STATE, paths_below, steps_of
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.background_writer import BackgroundWriter
from vlmpipe.trainer.storage.base import Storage, join_uri
from vlmpipe.trainer.storage.file_sums import files_below
from vlmpipe.trainer.storage.file_systems import link_or_copy
from vlmpipe.trainer.storage.outage import patiently
from vlmpipe.trainer.storage.records import read_record, seal

STATES, RESULT = PROGRAM, "result"  # folders of a run
INCOMPLETE = "checkpoint-is-incomplete.txt"  # transformers', while it saves after SIGTERM
MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".md")
POLL_S = 1.0  # between two looks at a stop, while a failed save waits
PARTS = "parts"  # names of files that other nodes have, by attempt
_NAME = re.compile(r"checkpoint-(\d+)")
# transformers leaves states of random generators on each rank's node, and resumes without.
_CHECKPOINT_FILE = re.compile(r".*/checkpoint-(?P<step>\d+)/(?P<name>(?P<random>rng_state.*\.pth)|.+)")


def states_of(run_uri: str) -> Storage:
    return open_storage(join_uri(run_uri, STATES))


def results_of(run_uri: str) -> Storage:
    return open_storage(join_uri(run_uri, RESULT))


class SavedStates:
    """The program's checkpoints of one start of the job. On the chief only."""

    def __init__(self, job: JobConfig, record: CommitRecord, folders: Sequence[Path]) -> None:
        self._job, self._folders, self._key = job, folders, signing_key(job.checkpoint)
        self._store, self._results = states_of(job.run.run_uri), results_of(job.run.run_uri)
        fresh, most = job.train.resume == "never", job.checkpoint.max_starts_without_progress
        submission = job.run.submission_name
        settle_other_trainer(job.run.run_uri, "vlmpipe's trainer", fresh=fresh, submission=submission)
        # One count: a number of its own would let a start that has both stores' folders supersede itself.
        above = last_attempt(self._results)
        self._mine: Attempts = claim_attempt(self._store, fresh=fresh, submission=submission, above=above)
        follow_attempt(self._results, self._mine)
        require_beginning(self._mine, most=most)
        self._record = dataclasses.replace(record, attempt=self._mine.attempt)
        self._failures = FailedSaves(job.checkpoint.max_s_without_commit)
        self._housekeeping = Housekeeping(
            self._store, Retention(job.train.keep_checkpoints), key=self._key, warn=self._failures.warn
        )
        self._seen: dict[Path, tuple[tuple[str, int, int], ...]] = {}  # files, when it was looked at last
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

    def resume(self, folder: Path) -> tuple[Checkpoint | None, list[str]]:
        """The newest good checkpoint, and why newer ones were passed over. A copy of it is in `folder` then."""
        passed_over: list[str] = []

        def fetch(store: Storage, name: str, listing: Listing) -> Checkpoint:
            found, _ = inspect(store, name, listing, key=self._key)
            require_same_model(found, self._record)
            require_all_parts(store, found)
            fetch_state(store, found, folder)
            return found

        checkpoint = newest_usable_of([self._store], fetch, passed_over)
        self.newest_step = checkpoint.record.step if checkpoint else 0
        begin_at(self._store, self._mine, self.newest_step, most=self._job.checkpoint.max_starts_without_progress)
        return checkpoint, passed_over

    def save_newest(self) -> None:
        """Copy the newest finished checkpoint, unless that was done before; again, a minute after it failed.

        Finished: with its state, and unchanged since the last look. Raises UserError when no copy has been committed
        for too long.
        """
        if not self._failures.is_waiting:
            self._save_newest(ended=False)

    def save_last(self, stopping: Callable[[], bool]) -> None:
        """Copy the newest checkpoint of a program that has ended; again, as often as it fails, until a stop request."""
        while not self._save_newest(ended=True):
            while self._failures.is_waiting and not stopping():
                time.sleep(POLL_S)
            if stopping():
                return

    def take_warnings(self) -> list[str]:
        """Warnings about saves since the last call, printed already."""
        return self._failures.take_warnings()

    def _save_newest(self, *, ended: bool) -> bool:
        """Return whether nothing finished is left to save."""
        found = sorted(
            ((step, path) for folder in self._folders for step, path in _finished(folder) if step > self.newest_step),
            reverse=True,
        )
        whole = []
        for step, path in found:
            files = _files(path)
            unchanged, self._seen[path] = self._seen.get(path) == files, files
            if files and (unchanged or ended):
                whole.append((path, step))
        return self._save(*whole[0]) if whole else True

    def _save(self, path: Path, step: int) -> bool:
        """Copy a checkpoint; False where that failed and is to be tried again."""
        name = checkpoint_name(self.attempt, step, uuid.uuid4().hex[:8])
        record = dataclasses.replace(self._record, step=step)
        self._housekeeping.before_save()
        try:
            with os_errors(f"reading {path}"):
                upload_node_files(self._store, name, 0, path, key=self._key)
            commit(self._store, name, record, key=self._key, warn=self._failures.warn)
        except UserError as error:
            self._housekeeping.failed(name)
            if _files(path) != self._seen[path]:
                return True  # the program keeps a limited number, and has deleted it
            if ending := self._failures.count(step, error):
                raise ending from error
            return False
        self.newest_step = step
        self._failures.committed(step)
        print(f"train: checkpoint of step {step} committed as {name}", flush=True)
        self._housekeeping.after_commit(name)
        return True

    def save_result(self, folder: Path, step: int, kind: str) -> str:
        """Keep the finished model, also where the store is away for a while. Returns its name."""
        name = checkpoint_name(self.attempt, step, uuid.uuid4().hex[:8])
        record = dataclasses.replace(self._record, step=step, checkpoint_format=kind)
        with _result_files(folder, kind) as kept:

            def save() -> None:
                upload_node_files(self._results, name, 0, kept, key=self._key)
                commit(self._results, name, record, key=self._key, warn=self._failures.warn)

            patiently("saving the result", save, limit_s=self._job.checkpoint.max_s_without_commit)
        Housekeeping(self._results, Retention(1), key=self._key, warn=self._failures.warn).after_commit(name)
        return name

    def ended(self, how: str) -> None:
        for store in (self._store, self._results):
            note_end(store, self._mine, how)


class NodeParts:
    """Files of checkpoints on the disk of a node that is not the chief. They are not copied; their names are noted."""

    def __init__(self, run_uri: str, attempt: int | None, node: int, folders: Sequence[Path]) -> None:
        self._store, self._node = states_of(run_uri), node
        self._folders = () if attempt is None else folders  # of a replica that does not train
        self._names = dict[str, list[str]]()
        self._file = BackgroundWriter(self._store, f"{PARTS}/{attempt or 0:04d}/node-{node}.json")
        self._is_noted = True

    def note(self) -> None:
        """Note what has been added since the last call."""
        found: dict[str, list[str]] = {}
        for file in (file.as_posix() for folder in self._folders for file in paths_below(folder)):
            if (match := _CHECKPOINT_FILE.fullmatch(file)) and not match["random"]:
                found.setdefault(match["step"], []).append(match["name"])
        new = {step: names for step, names in found.items() if names != self._names.get(step)}
        if new and not self._names:
            print(f"launcher: files of checkpoints on the disk of node {self._node} are not copied", flush=True)
        self._names |= new
        if new or not self._is_noted or (self._file.has_failed and self._file.is_due):
            self._is_noted = self._file.begin(self._content())

    def close(self) -> None:
        """Note what the program has left."""
        self.note()
        if self._names:
            self._file.settle(self._content())

    def _content(self) -> bytes:
        return seal({"names": self._names})


def require_all_parts(store: Storage, checkpoint: Checkpoint) -> None:
    """Raise ConfigError where another node has kept files of the checkpoint that the chief did not have."""
    kept = {info.name for info in store.list(f"{CHECKPOINTS}/{checkpoint.name}")}
    for info in store.list(f"{PARTS}/{checkpoint.record.attempt:04d}"):
        noted = read_record(store, info.name)["names"].get(str(checkpoint.record.step), [])
        if missing := [name for name in noted if f"{CHECKPOINTS}/{checkpoint.name}/{name}" not in kept]:
            node = info.name.rpartition("/")[2].removesuffix(".json")
            raise ConfigError(
                f"checkpoint {checkpoint.name} lacks {missing[0]}, which {node} kept on its own disk",
                expected="checkpoints that are whole on the first node's disk",
                fix="have the program gather its checkpoints on its first process (a full state dict), and start a new "
                "run (train.resume=never, or another run id)",
            )


def fetch_state(store: Storage, checkpoint: Checkpoint, folder: Path) -> None:
    """Copy the checkpoint's files, verified, to the place of its step in `folder`, where the program may change them.

    Raises DamagedError for a wrong file, and leaves none then.
    """
    arriving = folder / "arriving"
    try:
        fetch_folder(store, checkpoint, arriving, links=False).rename(state_folder(folder, checkpoint))
    finally:
        shutil.rmtree(arriving, ignore_errors=True)


def state_folder(folder: Path, checkpoint: Checkpoint) -> Path:
    """The place of a checkpoint in `folder`, named as the program had named it."""
    return folder / f"checkpoint-{checkpoint.record.step}"


def newest_result(job: JobConfig) -> tuple[Storage, Checkpoint | None, list[str]]:
    """The newest result that verifies, and its store. Raises UserError (74) when none does."""
    return newest_good_of([results_of(job.run.run_uri)], key=signing_key(job.checkpoint))


def require_same_model(checkpoint: Checkpoint, expected: CommitRecord) -> None:
    """Raise ConfigError where the run file names another model or other data than those the checkpoint has seen."""
    found = checkpoint.record
    for what, was, now in (
        ("the data", found.plan_sha256, expected.plan_sha256),
        ("the model section of the run file", found.model_sha256, expected.model_sha256),
        ("train.trainer.name", found.strategy, expected.strategy),
    ):
        if was != now:
            raise ConfigError(
                f"checkpoint {checkpoint.name} cannot be continued: {what} changed from {was} to {now}",
                expected="the run file that this run was started with",
                fix="restore it, or start a new run (train.resume=never, or another run id)",
            )


def _finished(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of the folders that the program has finished writing, as far as names tell."""
    found = []
    for state in paths_below(folder, STATE):
        match = _NAME.fullmatch(state.parent.name)
        if match and not (state.parent / INCOMPLETE).exists() and steps_of(state.parent) == int(match[1]):
            found.append((int(match[1]), state.parent))
    return found


def _files(folder: Path) -> tuple[tuple[str, int, int], ...]:
    try:
        return tuple(
            (str(path), status.st_size, status.st_mtime_ns)
            for path in sorted(folder.rglob("*"))
            if (status := path.stat())
        )
    except OSError:  # it is being deleted
        return ()


@contextlib.contextmanager
def _result_files(folder: Path, kind: str) -> Iterator[Path]:
    """Copy the result's files into a folder beside it: no checkpoints, and of a model no pickles and no code."""
    links = folder.parent / f"{folder.name}-{uuid.uuid4().hex[:8]}"
    for name, path in files_below(folder).items():
        of_model = path.suffix in MODEL_SUFFIXES and path.name != STATE
        if any(_NAME.fullmatch(part) for part in name.split("/")[:-1]) or (kind in HF_RESULTS and not of_model):
            continue
        (links / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(path, links / name)
    try:
        yield links
    finally:
        shutil.rmtree(links)
