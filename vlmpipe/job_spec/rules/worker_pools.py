"""Rules VP2xx: the roles of the worker pools, and what a Reduction Server and TPUs need."""

from __future__ import annotations

from collections.abc import Iterator

from vlmpipe.job_spec.rules.base import Breach, Job, Pool
from vlmpipe.job_spec.schema import Kind
from vlmpipe.job_spec.worker_pools import POOLS, REDUCTION_SERVER_POOL, WORKER_POOL, pool_problems

REDUCER_MACHINES = ("n1-highcpu-16", "n2-highcpu-16")
CODES = {
    Kind.NO_POOL: "VP201",
    Kind.MANY_POOLS: "VP202",
    Kind.CHIEF: "VP203",
    Kind.EMPTY_POOL: "VP204",
    Kind.TASK: "VP205",
    Kind.NO_MACHINE: "VP206",
    Kind.REDUCERS: "VP207",
    Kind.NO_IMAGE: "VP601",
}


def check(job: Job) -> Iterator[Breach]:
    """Roles by position first, then the Reduction Server and TPUs."""
    reducers = job.reducers
    for problem in pool_problems([pool.spec for pool in job.pools], job.unread):
        code = CODES[problem.kind]
        if reducers and problem.kind == Kind.EMPTY_POOL and problem.path == (POOLS, WORKER_POOL):
            code = "VP210"  # the same empty pool: there are no workers whose gradients could be reduced
        yield Breach(code, problem.path, problem.found, problem.expected, problem.fix)
    if reducers:
        yield from _reducers(reducers)
        yield from _reduced_nodes(job)
    if len(job.pools) > 1:
        for pool in job.pools:
            if pool.is_tpu:
                expected = "one pool of one replica: TPU hosts form no cluster of pools"
                yield Breach("VP213", pool.at(), f"TPUs in one of {len(job.pools)} pools", expected)


def _reducers(pool: Pool) -> Iterator[Breach]:
    for path, given in (
        (pool.at("machine_spec", "accelerator_type"), pool.accelerator_type or pool.accelerator_count),
        (pool.at("container_spec", "command"), pool.get("container_spec", "command")),
        (pool.at("container_spec", "args"), pool.get("container_spec", "args")),
    ):
        if given:
            found = given if isinstance(given, str) else "given"
            yield Breach("VP208", path, found, "nothing: the image needs no GPU and starts itself", "leave it out")
    if pool.machine_type and pool.machine_type not in REDUCER_MACHINES:
        path = pool.at("machine_spec", "machine_type")
        fix = "replica_count: ceil(nodes x Gbit/s of a node / 32)"
        yield Breach("VP209", path, pool.machine_type, " or ".join(REDUCER_MACHINES), fix)


def _reduced_nodes(job: Job) -> Iterator[Breach]:
    nodes = job.pools[:REDUCTION_SERVER_POOL]
    if all(not _may_have_gpus(pool) for pool in nodes):
        expected = "GPU nodes: it sums what NCCL all-reduce exchanges"
        yield Breach("VP212", (POOLS, REDUCTION_SERVER_POOL), "a Reduction Server for CPU nodes", expected)
    other = next((pool for pool in nodes if _has_another_plugin(job, pool)), None)
    if other:
        yield Breach(
            "VP211",
            other.at("machine_spec", "machine_type"),
            f"{other.machine_type} with a Reduction Server",
            "no Reduction Server: another NCCL network plugin serves this machine",
            f"leave {POOLS}[{REDUCTION_SERVER_POOL}] out",
        )


def _has_another_plugin(job: Job, pool: Pool) -> bool:
    machine = job.machine(pool)
    return machine is not None and bool(pool.accelerator_type) and not machine.reduction_server


def _may_have_gpus(pool: Pool) -> bool:
    return bool(pool.accelerator_type or pool.accelerator_count) or not pool.knows("machine_spec", "accelerator_type")
