"""Rules VP2xx and VP601: roles of the worker pools, and requirements of a Reduction Server and of TPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from vlmpipe.catalog.machines import REDUCER_GBPS, reducers_needed
from vlmpipe.job_spec.rules.base import Job, Pool
from vlmpipe.job_spec.violation import Violation
from vlmpipe.job_spec.worker_pools import CHIEF_POOL, EVALUATOR_POOL, POOLS, REDUCTION_SERVER_POOL, WORKER_POOL

REDUCER_MACHINES = ("n1-highcpu-16", "n2-highcpu-16")
_OUR_TRAINER = re.compile(
    r"\bvlmpipe\.trainer\.(launch|train|trials\.(tune|sweep)|feature_cache\.encode|evaluation\.evaluate)\b"
)


def check(job: Job) -> Iterator[Violation]:
    """Roles by position first, then the Reduction Server and TPUs."""
    if job.knows(POOLS):
        yield from role_violations(job.pools)
    if reducers := job.reducers:
        yield from _reducers(reducers)
        yield from _reduced_nodes(job, reducers)
    for pool in job.pools:
        if pool.is_tpu:
            yield from _tpus(job, pool)


def role_violations(pools: Sequence[Pool]) -> Iterator[Violation]:
    """Check the pools' roles: 0 is the chief alone, 1 the workers, 2 the Reduction Server, 3 the evaluators.

    No pool may be empty: the pipeline component's launcher drops empty pools, and those after them change roles.
    """
    if not pools:
        yield Violation("VP201", (POOLS,), "no pool", "at least pool 0, the chief")
    if len(pools) > EVALUATOR_POOL + 1:
        yield Violation("VP202", (POOLS,), f"{len(pools)} pools", "at most 4: chief, workers, reducers, evaluators")
    has_reducers = any(pool.is_reducers for pool in pools[REDUCTION_SERVER_POOL:][:1])
    for pool in pools:
        if pool.knows():
            yield from _replicas(pool, has_reducers)
            if pool.spec:
                yield from _content(pool)


def _replicas(pool: Pool, has_reducers: bool) -> Iterator[Violation]:
    path = pool.at("replica_count")
    if not pool.knows("replica_count"):
        return
    if pool.index == CHIEF_POOL and pool.replica_count != 1:
        fix = f"move the other replicas to {POOLS}[1]" if pool.replica_count > 1 else "write replica_count: 1"
        if pool.names_servers:
            fix = f"move the servers to {POOLS}[{REDUCTION_SERVER_POOL}], whose replicas are parameter servers"
        actual = str(pool.spec.get("replica_count", "nothing"))
        yield Violation("VP203", path, actual, "exactly 1: pool 0 is the chief", fix)
    elif pool.replica_count < 1:
        code = "VP210" if has_reducers and pool.index == WORKER_POOL else "VP204"
        expected = "at least 1: an empty pool is dropped, and the pools after it take other roles"
        fix = "a Reduction Server needs at least 2 nodes, so that pool 1 is not empty"
        yield Violation(code, pool.at(), "no replica", expected, fix)


def _content(pool: Pool) -> Iterator[Violation]:
    """A machine type, and exactly one of a container and a Python package."""
    if not pool.machine_type and pool.knows("machine_spec", "machine_type"):
        path = pool.at("machine_spec", "machine_type")
        yield Violation("VP206", path, "nothing", "a machine type such as g2-standard-8")
    image = pool.at("container_spec", "image_uri")
    has_container = "container_spec" in pool.spec
    has_package = "python_package_spec" in pool.spec
    if has_container and has_package:
        actual = "both container_spec and python_package_spec"
        yield Violation("VP205", pool.at(), actual, "one of container_spec and python_package_spec")
    elif has_package or pool.image_uri or not pool.knows("container_spec", "image_uri"):
        pass
    elif has_container or pool.knows("python_package_spec"):
        code = "VP601" if has_container else "VP205"
        yield Violation(code, image, "nothing", "an image in Artifact Registry")
    if pool.index != REDUCTION_SERVER_POOL and pool.is_reducers:
        expected = f"it in {POOLS}[2], the only pool with that role"
        fix = f"give the workers {POOLS}[1] and the reducers {POOLS}[2]"
        yield Violation("VP207", pool.at(), "the Reduction Server image", expected, fix)


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
    for path, value in (
        (pool.at("machine_spec", "accelerator_type"), pool.accelerator_type or pool.accelerator_count),
        (pool.at("container_spec", "command"), pool.container.get("command")),
        (pool.at("container_spec", "args"), pool.container.get("args")),
    ):
        if value:
            actual = value if isinstance(value, str) else "given"
            yield Violation("VP208", path, actual, "nothing: the image needs no GPU and starts itself", "leave it out")
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
        actual = f"{other.machine_type} with a Reduction Server"
        expected = "no Reduction Server: another NCCL network plugin serves this machine"
        fix = f"leave {POOLS}[{REDUCTION_SERVER_POOL}] out"
        yield Violation("VP211", other.at("machine_spec", "machine_type"), actual, expected, fix)
        return
    nodes_gbps = sum(pool.replica_count * machine.nic_gbps for pool, machine in known)
    needed, count = reducers_needed(1, nodes_gbps), reducers.replica_count
    if 0 < count < needed:  # slower than without reducers
        actual = f"{count} reducers, {count * REDUCER_GBPS} Gbit/s in total"
        expected = f"at least the {nodes_gbps:g} Gbit/s of the {job.num_nodes} nodes"
        yield Violation("VP215", reducers.at("replica_count"), actual, expected, f"write replica_count: {needed}")


def _may_have_gpus(pool: Pool) -> bool:
    return bool(pool.accelerator_type or pool.accelerator_count) or not pool.knows("machine_spec", "accelerator_type")
