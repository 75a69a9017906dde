"""Roles of a job's worker pools, which Vertex AI assigns by position (rules VP201 to VP207 and VP601)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from vlmpipe.job_spec.violation import FieldPath, Violation

CHIEF_POOL, WORKER_POOL, REDUCTION_SERVER_POOL, EVALUATOR_POOL = range(4)
REDUCTION_SERVER_IMAGE = "reductionserver"
POOLS = "worker_pool_specs"
STEP_LABEL = "vlmpipe-step"  # label of a job: its step of the pipeline; also in the project's billing
LOCAL_PORT_VARIABLE = "VLMPIPE_LOCAL_PORT"  # port at which the replicas of a local job meet


def is_unread(path: FieldPath, unread: Collection[FieldPath]) -> bool:
    """Whether this field, or one around it, could not be read."""
    return any(path[:length] in unread for length in range(1, len(path) + 1))


def is_reducers(pool: Mapping[str, Any]) -> bool:
    """Whether the pool runs the Reduction Server's image."""
    return REDUCTION_SERVER_IMAGE in pool.get("container_spec", {}).get("image_uri", "")


def pool_violations(
    pools: Sequence[Mapping[str, Any]], unread: Collection[FieldPath] = (), *, containers_only: bool = False
) -> Iterator[Violation]:
    """Check the pools' roles: 0 is the chief alone, 1 the workers, 2 the Reduction Server, 3 the evaluators.

    No pool may be empty: the pipeline component's launcher drops empty pools, and those behind them change roles.

    Args:
        pools: as `read_message` returns them.
        unread: paths of fields that could not be read; they are not checked.
        containers_only: refuse Python packages, as for jobs on this machine.
    """
    if is_unread((POOLS,), unread):
        return
    if not pools:
        yield Violation("VP201", (POOLS,), "no pool", "at least pool 0, the chief")
    if len(pools) > EVALUATOR_POOL + 1:
        yield Violation("VP202", (POOLS,), f"{len(pools)} pools", "at most 4: chief, workers, reducers, evaluators")
    for index, pool in enumerate(pools):
        if not is_unread((POOLS, index), unread):
            yield from _one_pool(index, pool, unread, containers_only)


def _one_pool(
    index: int, pool: Mapping[str, Any], unread: Collection[FieldPath], containers_only: bool
) -> Iterator[Violation]:
    path: FieldPath = (POOLS, index)
    replicas = pool.get("replica_count", 0)
    if not is_unread((*path, "replica_count"), unread):
        if index == CHIEF_POOL and replicas != 1:
            fix = f"move the other replicas to {POOLS}[1]" if replicas > 1 else "write replica_count: 1"
            found = str(pool.get("replica_count", "nothing"))
            yield Violation("VP203", (*path, "replica_count"), found, "exactly 1: pool 0 is the chief", fix)
        elif replicas < 1:
            expected = "at least 1: an empty pool is dropped, and the pools behind it take other roles"
            fix = "a Reduction Server needs at least 2 nodes, so that pool 1 is not empty"
            yield Violation("VP204", path, "no replica", expected, fix)
    if not pool:
        return
    machine = (*path, "machine_spec", "machine_type")
    if not pool.get("machine_spec", {}).get("machine_type") and not is_unread(machine, unread):
        yield Violation("VP206", machine, "nothing", "a machine type such as g2-standard-8")
    yield from _task(path, pool, unread, containers_only)
    if index != REDUCTION_SERVER_POOL and is_reducers(pool):
        expected = f"it in {POOLS}[2], the only pool with that role"
        fix = f"give the workers {POOLS}[1] and the reducers {POOLS}[2]"
        yield Violation("VP207", path, "the Reduction Server image", expected, fix)


def _task(
    path: FieldPath, pool: Mapping[str, Any], unread: Collection[FieldPath], containers_only: bool
) -> Iterator[Violation]:
    image, package = (*path, "container_spec", "image_uri"), (*path, "python_package_spec")
    has_package = "python_package_spec" in pool and not containers_only
    if "container_spec" in pool and has_package:
        found = "both container_spec and python_package_spec"
        yield Violation("VP205", path, found, "one of container_spec and python_package_spec")
    elif has_package or is_unread(image, unread):
        return
    elif "container_spec" not in pool:
        if not is_unread(package, unread):
            yield Violation("VP205", image, "nothing", "an image in Artifact Registry")
    elif not pool["container_spec"].get("image_uri"):
        yield Violation("VP601", image, "nothing", "an image in Artifact Registry")
