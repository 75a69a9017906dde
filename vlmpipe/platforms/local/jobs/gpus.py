"""GPUs that a run file buys elsewhere and this machine, which stands in for its machines, does not have."""

from __future__ import annotations

import os
from collections.abc import Mapping

from vlmpipe.config.run_config import RunConfig
from vlmpipe.job_spec.build import jobs_of
from vlmpipe.trainer.preflight.devices import visible_gpus


def missing_gpus(config: RunConfig, environment: Mapping[str, str] = os.environ) -> str:
    """A sentence for the start of a local run whose jobs name GPUs; empty where none does, or they are here."""
    clusters = [config.cluster.of_job(job) for job in jobs_of(config)]
    named = {
        f"{cluster.accelerator_count} x {cluster.accelerator_type} ({cluster.machine_type})": cluster.accelerator_count
        for cluster in clusters
        if cluster.accelerator_count
    }
    here = visible_gpus(environment)
    if here >= max(named.values(), default=0):
        return ""
    elsewhere = f"cluster names {' and '.join(named)}, which a run on Vertex AI has"
    if here:
        return f"This machine has {here} GPU{'s' if here > 1 else ''}; {elsewhere}"
    return f"This machine has no GPU, so jobs run on its CPU; {elsewhere}"
