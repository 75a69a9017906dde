"""Asks the service of a pipeline job whether it still runs, with the account of the pipeline's steps."""

from __future__ import annotations

from dataclasses import asdict

from vlmpipe.components.runtime.folder_lock import OVER, RUNNING, Holder
from vlmpipe.platforms.table import platform_of
from vlmpipe.records.compiled import CompiledSettings
from vlmpipe.trainer.errors import UserError


def this_job(compiled: str, job_name: str) -> Holder:
    """This pipeline job, as others that find it in the run's folder ask for it."""
    settings = CompiledSettings.read(compiled)
    target = settings.target
    place = platform_of(target).job_place(settings.run_file)
    where = {name: place.get(name, "") for name in ("project", "location", "namespace")}
    return Holder(job_name, target, **where, closed=False)


def state_of_job(holder: Holder) -> str:
    """`RUNNING` or `OVER`. Raises UserError where its service does not say."""
    is_over = platform_of(holder.target).is_over(holder.job_name, asdict(holder))
    if is_over is None:
        raise UserError("its record does not say where it runs")
    return OVER if is_over else RUNNING
