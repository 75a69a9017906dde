"""Worker pools by position, and names of our own in a job spec."""

from __future__ import annotations

from vlmpipe.job_spec.forms import WorkerPool
from vlmpipe.job_spec.read_forms import ReadPool

CHIEF_POOL, WORKER_POOL, REDUCTION_SERVER_POOL, EVALUATOR_POOL = range(4)  # Vertex AI's roles
REDUCTION_SERVER_IMAGE = "reductionserver"
POOLS = "worker_pool_specs"
STEP_LABEL = "vlmpipe-step"  # label of a job: its step of the pipeline; also in the project's billing
STOP_GRACE_VARIABLE = "VLMPIPE_STOP_GRACE_S"  # seconds that a replica may take to end, where it needs more than usual


def is_reducers(pool: WorkerPool | ReadPool) -> bool:
    """Return whether the pool runs the Reduction Server's image."""
    container = pool.get("container_spec")
    return container is not None and REDUCTION_SERVER_IMAGE in container.get("image_uri", "")
