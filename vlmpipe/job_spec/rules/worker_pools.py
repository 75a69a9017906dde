"""Rules VP2xx: the roles of the worker pools, and what a Reduction Server and TPUs need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from vlmpipe.catalog.machines import REDUCER_GBPS, reducers_needed
from vlmpipe.job_spec.rules.base import Job, Pool
from vlmpipe.job_spec.violation import Violation
from vlmpipe.job_spec.worker_pools import POOLS, REDUCTION_SERVER_POOL, WORKER_POOL, pool_violations

REDUCER_MACHINES = ("n1-highcpu-16", "n2-highcpu-16")
_OUR_TRAINER = re.compile(r"\btrainer\.(launch|train|tune_trial|feature_cache\.encode|evaluation\.evaluate)\b")


def check(job: Job) -> Iterator[Violation]:
    """Roles by position first, then the Reduction Server and TPUs."""
    reducers = job.reducers
    for violation in pool_violations([pool.spec for pool in job.pools], job.unread):
        no_workers = violation.code == "VP204" and violation.field == (POOLS, WORKER_POOL)
        yield replace(violation, code="VP210") if reducers and no_workers else violation
    if reducers:
        yield from _reducers(reducers)
        yield from _reduced_nodes(job, reducers)
    for pool in job.pools:
        if pool.is_tpu:
            yield from _tpus(job, pool)


def _tpus(job: Job, pool: Pool) -> Iterator[Violation]:
    machine = pool.machine_type or pool.accelerator_type
    if module := next((match[0] for _, word in pool.words() if (match := _OUR_TRAINER.search(word))), ""):
        expected = "GPU or CPU nodes: this package's trainer does not run on TPUs"
        fix = f"a GPU machine of similar memory is {job.catalog.gpu_machine_like(machine)}"
        yield Violation("VP214", pool.at("machine_spec"), f"TPUs ({machine}) for {module}", expected, fix)
    elif len(job.pools) > 1:
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
        fix = f"replica_count: ceil(nodes x Gbit/s of a node / {REDUCER_GBPS})"
        yield Violation("VP209", path, pool.machine_type, " or ".join(REDUCER_MACHINES), fix)


def _reduced_nodes(job: Job, reducers: Pool) -> Iterator[Violation]:
    nodes = job.pools[:REDUCTION_SERVER_POOL]
    if not any(_may_have_gpus(pool) for pool in nodes):
        expected = "GPU nodes: it sums what NCCL all-reduce exchanges"
        yield Violation("VP212", reducers.at(), "a Reduction Server for CPU nodes", expected)
    known = [(pool, machine) for pool in nodes if pool.accelerator_type and (machine := job.machine(pool))]
    other = next((pool for pool, machine in known if not machine.reduction_server), None)
    if other:
        found = f"{other.machine_type} with a Reduction Server"
        expected = "no Reduction Server: another NCCL network plugin serves this machine"
        fix = f"leave {POOLS}[{REDUCTION_SERVER_POOL}] out"
        yield Violation("VP211", other.at("machine_spec", "machine_type"), found, expected, fix)
        return
    nodes_gbps = sum(pool.replica_count * machine.nic_gbps for pool, machine in known)
    needed, count = reducers_needed(1, nodes_gbps), reducers.replica_count
    if 0 < count < needed:  # slower than without reducers
        found = f"{count} reducers, {count * REDUCER_GBPS} Gbit/s in total"
        expected = f"at least the {nodes_gbps:g} Gbit/s of the {job.num_nodes} nodes"
        yield Violation("VP215", reducers.at("replica_count"), found, expected, f"write replica_count: {needed}")


def _may_have_gpus(pool: Pool) -> bool:
    return bool(pool.accelerator_type or pool.accelerator_count) or not pool.knows("machine_spec", "accelerator_type")
