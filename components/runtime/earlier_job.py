"""Two pipeline jobs in one run's folder: a clone in the console beside the original, a retry beside what it repeats."""

from __future__ import annotations

from vlmpipe.runs.steps import parse_record
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.progress import StepRecord
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import unseal

FIRST, LAST = "resolve-run", "notify"


def unfinished_job(stage_uri: str, run_uri: str, job_name: str) -> str:
    """A sentence about another job that began in this folder and has recorded no end; empty where there is none.

    Whether it still runs only its service knows. Training holds the folder: the job that starts later takes over.

    Args:
        stage_uri: the stage's folder, in which its first step is recorded; of a run without stages the run's.
        run_uri: the run's, in which its end is.
    """
    first, last = _record(open_storage(stage_uri), FIRST), _record(open_storage(run_uri), LAST)
    other = str(first.detail.get("job_name") or "") if first else ""
    if first is None or other in ("", job_name) or (last and last.ended_s and last.started_s >= first.started_s):
        return ""
    return (
        f"job {other} has begun in this folder too, and has recorded no end: if it still runs, cancel one of the two; "
        f"of two trainings the one that started later goes on, and the other ends with exit code "
        f"{int(ExitCode.SUPERSEDED)}"
    )


def _record(store: Storage, step: str) -> StepRecord | None:
    name = f"steps/{step}.json"
    if store.stat(name) is None:
        return None
    try:
        return parse_record(step, unseal(store.read(name)))
    except ValueError:  # damaged: this job writes its own
        return None
