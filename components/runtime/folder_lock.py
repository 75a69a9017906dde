"""One pipeline job at a time in a run's folder: a clone in the console, or a retry next to what it repeats, waits.

The lock is an object of the folder that names its holder, taken by compare-and-swap. It has no time limit: between two
steps, or while machines are waited for, no process of a job lives that could renew one. Whether a holder still runs is
the service's knowledge, so the service is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage.base import Storage, VersionConflictError
from vlmpipe.trainer.storage.records import seal, unseal

FILE = "job.json"
RUNNING, OVER = "running", "over"


@dataclass(frozen=True)
class Holder:
    """A pipeline job, and where its service knows it.

    project, location: on Vertex AI. namespace: on Kubeflow. closed: whether its exit handler has run.
    """

    job_name: str
    target: str
    project: str = ""
    location: str = ""
    namespace: str = ""
    closed: bool = False


def take_folder(store: Storage, holder: Holder, state_of: Callable[[Holder], str]) -> str:
    """Hold the run's folder for this job. Returns a sentence about a job that held it before; "" without one.

    Raises UserError (69) while another job holds it. A step that is repeated in the same job holds it already.

    Args:
        store: the run's folder.
        state_of: `RUNNING` or `OVER`, by the holder's service. Raises UserError where the service cannot say.
    """
    while True:
        recorded, version = read_holder(store)
        another = recorded if recorded and recorded.job_name != holder.job_name else None
        if another:
            _require_over(store, another, state_of)
        try:
            store.replace(FILE, seal(asdict(holder)), version)
        except VersionConflictError:
            continue  # another job took it, or this one's answer was lost
        return f"pipeline job {another.job_name}, which held this folder before, has ended" if another else ""


@contextlib.contextmanager
def leaving_folder(store: Storage, job_name: str) -> Iterator[Holder | None]:
    """The block of a job's last step, after which the folder is free. Yields another job that holds it now."""
    holder, _ = read_holder(store)
    if holder and holder.job_name != job_name and not holder.closed:
        yield holder
        return
    try:
        yield None
    finally:
        _close(store, job_name)


def _close(store: Storage, job_name: str) -> None:
    while True:
        holder, version = read_holder(store)
        if holder is None or holder.job_name != job_name:
            return
        with contextlib.suppress(VersionConflictError):
            return store.replace(FILE, seal(asdict(replace(holder, closed=True))), version)


def read_holder(store: Storage) -> tuple[Holder | None, str]:
    """Return the holder and the version of its record. A damaged record has no holder: writes are atomic."""
    info = store.stat(FILE)
    if info is None:
        return None, ""
    try:
        return Holder(**unseal(store.read(FILE), required=True)), info.version
    except (ValueError, TypeError):
        return None, info.version


def _require_over(store: Storage, holder: Holder, state_of: Callable[[Holder], str]) -> None:
    try:
        state = state_of(holder)
    except UserError as error:
        if holder.closed:
            return
        raise UserError(
            f"pipeline job {holder.job_name} holds this run's folder, and whether it still runs is not known: "
            f"{error.found.splitlines()[0]}",
            expected=f"one pipeline job at a time in {store.root_uri}",
            fix=f"if it has ended, delete {store.uri(FILE)} and start this one again; for a run of its own leave "
            "run_id empty",
            code=ExitCode.UNAVAILABLE,
        ) from error
    if state != OVER:
        raise UserError(
            f"pipeline job {holder.job_name} holds this run's folder and is still {state}",
            expected=f"one pipeline job at a time in {store.root_uri}",
            fix="wait for its end, or cancel it, and start this one again; for a run of its own leave run_id empty",
            code=ExitCode.UNAVAILABLE,
        )
