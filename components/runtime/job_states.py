"""Asks the service of a pipeline job whether it still runs, with the account of the pipeline's steps."""

from __future__ import annotations

import json

from vlmpipe.components.runtime.folder_lock import OVER, RUNNING, Holder
from vlmpipe.trainer.errors import ConfigError, UserError


def this_job(compiled: str, job_name: str) -> Holder:
    """This pipeline job, as others that find it in the run's folder ask for it."""
    settings = json.loads(compiled)
    target, gcp = settings["target"], settings["run_file"].get("gcp") or {}
    if target == "vertex":
        return Holder(job_name, target, project=gcp.get("project", ""), location=gcp.get("location", ""))
    return Holder(job_name, target, namespace=_own_namespace())


def state_of_job(holder: Holder) -> str:
    """`RUNNING` or `OVER`. Raises UserError where its service does not say."""
    if holder.target == "vertex" and holder.project and holder.location:
        from vlmpipe.platforms.vertex.client import Place  # not above: the SDK takes seconds to import
        from vlmpipe.platforms.vertex.runs.client import OVER as OVER_THERE
        from vlmpipe.platforms.vertex.runs.client import Runs, state_of
        from vlmpipe.platforms.vertex.runs.names import Address

        place = Place(holder.project, holder.location)
        return OVER if state_of(Runs(place).get(Address(place, holder.job_name))) in OVER_THERE else RUNNING
    if holder.target == "kubeflow" and holder.namespace:
        from vlmpipe.platforms.kubeflow.jobs.client import is_workflow_over

        return OVER if is_workflow_over(holder.job_name, holder.namespace) else RUNNING
    raise UserError("its record does not say where it runs")


def _own_namespace() -> str:
    from vlmpipe.platforms.kubeflow.jobs.client import connection

    try:
        return connection()[1]
    except ConfigError:  # outside of a cluster
        return ""
