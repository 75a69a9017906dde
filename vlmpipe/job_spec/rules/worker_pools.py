"""Rules VP2xx: the roles of the worker pools, and what a Reduction Server and TPUs need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vlmpipe.job_spec.rules.base import Job, Pool
from vlmpipe.job_spec.violation import Violation
from vlmpipe.job_spec.worker_pools import POOLS, REDUCTION_SERVER_POOL, WORKER_POOL, pool_violations

REDUCER_MACHINES = ("n1-highcpu-16", "n2-highcpu-16")


def check(job: Job) -> Iterator[Violation]:
    """Roles by position first, then the Reduction Server and TPUs."""
    reducers = job.reducers
    for violation in pool_violations([pool.spec for pool in job.pools], job.unread):
        no_workers = violation.code == "VP204" and violation.field == (POOLS, WORKER_POOL)
        yield replace(violation, code="VP210") if reducers and no_workers else violation
    if reducers:
        yield from _reducers(reducers)
        yield from _reduced_nodes(job)
    if len(job.pools) > 1:
        for pool in job.pools:
            if pool.is_tpu:
                expected = "one pool of one replica: TPU hosts form no cluster of pools"
                yield Violation("VP213", pool.at(), f"TPUs in one of {len(job.pools)} pools", expected)


def _reducers(pool: Pool) -> Iterator[Violation]:
    for path, given in (
        (pool.at("machine_spec", "accelerator_type"), pool.accelerator_type or pool.accelerator_count),
        (pool.at("container_spec", "command"), pool.get("container_spec", "command")),
        (pool.at("container_spec", "args"), pool.get("container_spec", "args")),
    ):
        if given:
            found = given if isinstance(given, str) else "given"
            yield Violation("VP208", path, found, "nothing: the image needs no GPU and starts itself", "leave it out")
    if pool.machine_type and pool.machine_type not in REDUCER_MACHINES:
        path = pool.at("machine_spec", "machine_type")
        fix = "replica_count: ceil(nodes x Gbit/s of a node / 32)"
        yield Violation("VP209", path, pool.machine_type, " or ".join(REDUCER_MACHINES), fix)


def _reduced_nodes(job: Job) -> Iterator[Violation]:
    nodes = job.pools[:REDUCTION_SERVER_POOL]
    if all(not _may_have_gpus(pool) for pool in nodes):
        expected = "GPU nodes: it sums what NCCL all-reduce exchanges"
        yield Violation("VP212", (POOLS, REDUCTION_SERVER_POOL), "a Reduction Server for CPU nodes", expected)
    other = next((pool for pool in nodes if _has_another_plugin(job, pool)), None)
    if other:
        yield Violation(
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
