"""The roles that Vertex AI gives to the positions of a job's worker pools."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from vlmpipe.job_spec.schema import FieldPath, Kind, Problem

CHIEF_POOL, WORKER_POOL, REDUCTION_SERVER_POOL, EVALUATOR_POOL = range(4)
REDUCTION_SERVER_IMAGE = "reductionserver"
POOLS = "worker_pool_specs"
STEP_LABEL = "vlmpipe-step"  # which step of the pipeline a job is; also in the project's billing
LOCAL_PORT_VARIABLE = "VLMPIPE_LOCAL_PORT"  # in a job on this machine: where its replicas meet


def is_unread(path: FieldPath, unread: Collection[FieldPath]) -> bool:
    """Whether this field, or something around it, was given in a form that could not be read."""
    return any(path[:length] in unread for length in range(1, len(path) + 1))


def is_reducers(pool: Mapping[str, Any]) -> bool:
    """Whether the pool runs the Reduction Server's image."""
    return REDUCTION_SERVER_IMAGE in pool.get("container_spec", {}).get("image_uri", "")


def pool_problems(
    pools: Sequence[Mapping[str, Any]], unread: Collection[FieldPath] = (), *, containers_only: bool = False
) -> Iterator[Problem]:
    """What is wrong with the pools' roles.

    Pool 0 is the chief alone, 1 the workers, 2 the Reduction Server and 3 the evaluators. No pool may be empty: the
    pipeline component's launcher drops an empty one, and those behind it move up into other roles.

    Args:
        pools: as `read_message` understood them.
        unread: paths of fields that it could not; nothing is said of them.
        containers_only: whether a Python package is no task, as for jobs on this machine.
    """
    if is_unread((POOLS,), unread):
        return
    if not pools:
        yield Problem(Kind.NO_POOL, (POOLS,), "empty", "at least pool 0, the chief")
    if len(pools) > EVALUATOR_POOL + 1:
        expected = "at most 4: chief, workers, reducers, evaluators"
        yield Problem(Kind.MANY_POOLS, (POOLS,), f"{len(pools)} pools", expected, verb="has")
    for index, pool in enumerate(pools):
        if not is_unread((POOLS, index), unread):
            yield from _one_pool(index, pool, unread, containers_only)


def _one_pool(
    index: int, pool: Mapping[str, Any], unread: Collection[FieldPath], containers_only: bool
) -> Iterator[Problem]:
    where: FieldPath = (POOLS, index)
    replicas = pool.get("replica_count", 0)
    counted = not is_unread((*where, "replica_count"), unread)
    if index == CHIEF_POOL and replicas != 1 and counted:
        yield Problem(
            Kind.CHIEF,
            (*where, "replica_count"),
            str(pool.get("replica_count", "missing")),
            "exactly 1: pool 0 is the chief",
            f"move the other replicas to {POOLS}[1]" if replicas > 1 else "write replica_count: 1",
        )
    if replicas < 1 and counted and index != CHIEF_POOL:
        yield Problem(
            Kind.EMPTY_POOL,
            where,
            "no replica",
            "at least 1: an empty pool is dropped, and the pools behind it take other roles",
            "a Reduction Server needs at least 2 nodes, so that pool 1 is not empty",
            verb="has",
        )
    if not pool:
        return  # of an empty pool, that is all there is to say
    machine = (*where, "machine_spec", "machine_type")
    if not pool.get("machine_spec", {}).get("machine_type") and not is_unread(machine, unread):
        yield Problem(Kind.NO_MACHINE, machine, "missing", "a machine type such as g2-standard-8")
    yield from _task(where, pool, unread, containers_only)
    if index != REDUCTION_SERVER_POOL and is_reducers(pool):
        yield Problem(
            Kind.REDUCERS,
            where,
            "the Reduction Server image",
            f"it in {POOLS}[2], the only place where it has that role",
            f"give the workers {POOLS}[1] and the reducers {POOLS}[2]",
            verb="runs",
        )


def _task(
    where: FieldPath, pool: Mapping[str, Any], unread: Collection[FieldPath], containers_only: bool
) -> Iterator[Problem]:
    image = (*where, "container_spec", "image_uri")
    package = (*where, "python_package_spec")
    has_package = "python_package_spec" in pool and not containers_only
    if "container_spec" in pool and has_package:
        expected = "one of container_spec and python_package_spec"
        yield Problem(Kind.TASK, where, "both container_spec and python_package_spec", expected, verb="has")
    elif not has_package and "container_spec" not in pool:
        if not is_unread(image, unread) and not is_unread(package, unread):
            yield Problem(Kind.TASK, image, "missing", "an image in Artifact Registry")
    elif not has_package and not pool["container_spec"].get("image_uri") and not is_unread(image, unread):
        yield Problem(Kind.NO_IMAGE, image, "missing", "an image in Artifact Registry")
