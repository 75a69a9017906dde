"""Rules VP4xx: Spot, Flex-start, waiting, restarting and persistent resources, which apply to a whole job."""

from __future__ import annotations

from collections.abc import Iterator

from vlmpipe.config.sections.cluster import FLEX_START_MAX_TIMEOUT_S
from vlmpipe.config.service_forms import PERSISTENT_RESOURCE
from vlmpipe.job_spec.rules.base import Job
from vlmpipe.job_spec.violation import Violation
from vlmpipe.job_spec.worker_pools import POOLS

SPOT, FLEX_START = "SPOT", "FLEX_START"

_SCHEDULING = "scheduling"


def check(job: Job) -> Iterator[Violation]:
    """Requirements of the scheduling strategy and of restarts."""
    strategy = job.scheduling.get("strategy")
    if strategy == SPOT:
        yield from _spot(job)
    if strategy == FLEX_START:
        yield from _flex_start(job)
    elif job.scheduling.get("max_wait_duration") is not None and job.knows(_SCHEDULING, "strategy"):
        path = (_SCHEDULING, "max_wait_duration")
        actual = f"{job.scheduling.get('max_wait_duration')} with strategy {strategy or 'STANDARD'}"
        yield Violation("VP405", path, actual, "FLEX_START, the only strategy that waits", "leave it out")
    yield from _restart(job)
    yield from _persistent_resource(job)


def _persistent_resource(job: Job) -> Iterator[Violation]:
    name, strategy, path = (
        job.spec.get("persistent_resource_id"),
        job.scheduling.get("strategy"),
        ("persistent_resource_id",),
    )
    if name and not PERSISTENT_RESOURCE.fits(name):
        expected = "its id: lower case, digits and dashes, without project and location, which are the job's"
        yield Violation("VP408", path, name, expected, f"write {name.rpartition('/')[2]}" if "/" in name else "")
    if name and strategy in (SPOT, FLEX_START):
        expected = "no strategy: the machines of a persistent resource are there already"
        yield Violation("VP409", (_SCHEDULING, "strategy"), f"{strategy} on {name}", expected, "leave one of both out")


def _spot(job: Job) -> Iterator[Violation]:
    for pool in job.pools:
        if pool.is_tpu:
            actual = pool.machine_type or pool.accelerator_type
            yield Violation(
                "VP401", pool.at("machine_spec"), f"{actual} on Spot", "GPU or CPU machines", "use STANDARD"
            )


def _flex_start(job: Job) -> Iterator[Violation]:
    offered = [name for name, gpu in job.catalog.gpus.items() if gpu.flex_start]
    for pool in job.pools:
        if pool.is_reducers or not pool.knows("machine_spec", "accelerator_type"):
            continue
        if pool.accelerator_type not in offered:
            path = pool.at("machine_spec", "accelerator_type")
            actual = pool.accelerator_type or "no GPU"
            yield Violation(
                "VP402", path, f"{actual} with FLEX_START", f"one of {', '.join(offered)}", "or use STANDARD"
            )
    machines = {(pool.machine_type, pool.accelerator_type, pool.accelerator_count) for pool in job.pools if pool.spec}
    if len(machines) > 1 and all(pool.knows("machine_spec") for pool in job.pools):
        actual = ", ".join(sorted({f"{name} with {count} x {gpu}" if gpu else name for name, gpu, count in machines}))
        expected = "the same machine in all pools, so no Reduction Server"
        yield Violation("VP403", (POOLS,), actual, expected, "or use STANDARD or SPOT")
    timeout = job.scheduling.get("timeout")
    if timeout and float(timeout.removesuffix("s")) > FLEX_START_MAX_TIMEOUT_S:
        expected = f"at most {FLEX_START_MAX_TIMEOUT_S}s, 7 days"
        yield Violation("VP404", (_SCHEDULING, "timeout"), timeout, expected, "train in several jobs from checkpoints")


def _restart(job: Job) -> Iterator[Violation]:
    path = (_SCHEDULING, "restart_job_on_worker_restart")
    restart = job.scheduling.get("restart_job_on_worker_restart")
    if restart and job.scheduling.get("disable_retries"):
        actual = "true with disable_retries true, which overrides it"
        yield Violation("VP406", path, actual, "one of the two", "leave disable_retries out")
    if job.num_nodes > 1 and not restart and job.knows(*path) and not job.has_parameter_servers:
        spot = " on Spot" if job.scheduling.get("strategy") == SPOT else ""
        yield Violation(
            "VP407",
            path,
            f"{'false' if restart is False else 'missing'} with {job.num_nodes} nodes{spot}",
            "true: a node that is restarted alone cannot rejoin the others' NCCL communicators, and the job hangs",
            "write restart_job_on_worker_restart: true and resume from a checkpoint",
        )
