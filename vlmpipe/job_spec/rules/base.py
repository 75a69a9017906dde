"""Input of the rules: the readable part of a job and of its worker pools."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.job_spec.forms import Scheduling
from vlmpipe.job_spec.read_forms import ReadContainer, ReadMachine, ReadPackage, ReadPool, ReadSpec, ReadTask
from vlmpipe.job_spec.violation import FieldPath
from vlmpipe.job_spec.worker_pools import CHIEF_POOL, POOLS, REDUCTION_SERVER_POOL, WORKER_POOL, is_reducers

if TYPE_CHECKING:
    from vlmpipe.catalog.machines import Catalog, Machine

# What replicas of pool 0 are called in their words where they are parameter servers.
_SERVERS = re.compile(r"parameter[-_ ]?server|(^|=)ps$|[-_]ps[-_.]", re.IGNORECASE)
_TPU_MACHINES = ("ct5", "ct6", "tpu", "cloud-tpu")  # v5e, v6e and later, older ones


@dataclass(frozen=True)
class Pool:
    """The readable part of a worker pool."""

    index: int
    spec: ReadPool
    unread: frozenset[FieldPath] = frozenset()

    def at(self, *names: str | int) -> FieldPath:
        """Path of a field of this pool."""
        return (POOLS, self.index, *names)

    def knows(self, *names: str | int) -> bool:
        """Return whether the field could be read, or is unset."""
        return not _is_unread(self.at(*names), self.unread)

    @property
    def machine(self) -> ReadMachine:
        """The machine's fields; empty where they are unset."""
        return self.spec.get("machine_spec", {})

    @property
    def container(self) -> ReadContainer:
        """The container's fields; empty where they are unset."""
        return self.spec.get("container_spec", {})

    @property
    def package(self) -> ReadPackage:
        """The Python package's fields; empty where they are unset."""
        return self.spec.get("python_package_spec", {})

    @property
    def replica_count(self) -> int:
        return self.spec.get("replica_count", 0)

    @property
    def machine_type(self) -> str:
        return self.machine.get("machine_type", "")

    @property
    def accelerator_type(self) -> str:
        """Empty for none, also where the API's name for "unspecified" is written."""
        name = self.machine.get("accelerator_type", "")
        return "" if name == "ACCELERATOR_TYPE_UNSPECIFIED" else name

    @property
    def accelerator_count(self) -> int:
        return self.machine.get("accelerator_count", 0)

    @property
    def image_uri(self) -> str:
        return self.container.get("image_uri", "")

    @property
    def is_reducers(self) -> bool:
        return is_reducers(self.spec)

    @property
    def names_servers(self) -> bool:
        """Return whether its words are those of parameter servers."""
        return any(_SERVERS.search(word) for _, word in self.words())

    @property
    def is_tpu(self) -> bool:
        return self.accelerator_type.startswith("TPU_") or self.machine_type.startswith(_TPU_MACHINES)

    @property
    def is_node(self) -> bool:
        """Return whether the pool's replicas train: the chief's and the workers'."""
        return self.index in (CHIEF_POOL, WORKER_POOL) and not self.is_reducers

    def tasks(self) -> Iterator[tuple[FieldPath, ReadTask]]:
        """The pool's container and Python package, each with its path."""
        if self.container:
            yield self.at("container_spec"), self.container
        if self.package:
            yield self.at("python_package_spec"), self.package

    def word_lists(self) -> Iterator[tuple[FieldPath, list[str]]]:
        """Commands and arguments, each with its path."""
        for path, task in self.tasks():
            yield (*path, "command"), list(task.get("command", ()))
            yield (*path, "args"), list(task.get("args", ()))

    def words(self) -> Iterator[tuple[FieldPath, str]]:
        """The words of commands and arguments, each with its path."""
        for path, words in self.word_lists():
            for index, word in enumerate(words):
                yield (*path, index), word

    def environment(self) -> Iterator[tuple[FieldPath, str, str]]:
        """Path, name and value of each variable."""
        for path, task in self.tasks():
            for index, variable in enumerate(task.get("env", ())):
                yield (*path, "env", index), variable.get("name", ""), variable.get("value", "")


@dataclass(frozen=True)
class Job:
    """The readable part of a job's spec, and its region; empty if unknown."""

    spec: ReadSpec
    unread: frozenset[FieldPath]
    region: str
    catalog: Catalog
    torch_builds: Mapping[str, str]  # of images of which it is known: cu130, cu126 or cpu

    @functools.cached_property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(
            Pool(index, spec, self.unread) for index, spec in enumerate(self.spec.get("worker_pool_specs", ()))
        )

    def knows(self, *names: str | int) -> bool:
        """Return whether the field could be read, or is unset."""
        return not _is_unread(names, self.unread)

    @property
    def scheduling(self) -> Scheduling:
        """How the job is scheduled; empty where it is unset."""
        return self.spec.get("scheduling", {})

    def machine(self, pool: Pool) -> Machine | None:
        """The catalog's entry for the pool's machine."""
        return self.catalog.machines.get(pool.machine_type)

    @property
    def reducers(self) -> Pool | None:
        """The Reduction Server's pool, if it is at its position."""
        return next((pool for pool in self.pools[REDUCTION_SERVER_POOL:][:1] if pool.is_reducers), None)

    @property
    def has_parameter_servers(self) -> bool:
        """Return whether pool 2 holds parameter servers: a worker that is restarted alone finds them again."""
        if self.pools and self.pools[CHIEF_POOL].names_servers:  # at the wrong place
            return True
        others = self.pools[REDUCTION_SERVER_POOL:]
        return bool(others) and bool(others[0].replica_count) and not others[0].is_reducers

    @property
    def num_nodes(self) -> int:
        """Replicas that train together."""
        return sum(pool.replica_count for pool in self.pools if pool.is_node)


def _is_unread(path: FieldPath, unread: frozenset[FieldPath]) -> bool:
    """Return whether a field, or one around it, could not be read."""
    return any(path[:length] in unread for length in range(1, len(path) + 1))
