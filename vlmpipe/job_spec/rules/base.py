"""Rules, violations, and the view of a job that rules read."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from vlmpipe.job_spec.schema import FieldPath
from vlmpipe.job_spec.worker_pools import CHIEF_POOL, POOLS, REDUCTION_SERVER_POOL, WORKER_POOL, is_reducers, is_unread

if TYPE_CHECKING:
    from vlmpipe.catalog.machines import Catalog, Machine

FOLDER = Path(__file__).parent
Severity = Literal["error", "warning"]
# Machine types of TPU v5e, v6e and later, and of the older ones.
_TPU_MACHINES = ("ct5", "ct6", "tpu", "cloud-tpu")


@dataclass(frozen=True)
class Rule:
    """A rule about job specs. `source` is where the platform, or a measurement, says so."""

    code: str
    title: str
    severity: Severity
    source: str


@dataclass(frozen=True)
class Violation:
    """A rule that a spec breaks, where, and what is right. Holds no secret."""

    code: str
    severity: Severity
    path: str
    found: str
    expected: str
    fix: str
    source: str

    def text(self) -> str:
        """One line."""
        fix = f"; {self.fix}" if self.fix else ""
        return f"{self.code} {self.path}: found {self.found}, expected {self.expected}{fix}"


@dataclass(frozen=True)
class Breach:
    """A violation as a rule's function says it: the rest is in the rule."""

    code: str
    path: FieldPath
    found: str
    expected: str
    fix: str = ""


def read_yaml(name: str) -> dict[str, Any]:
    """One of this package's own files."""
    # libyaml reads the files ten times faster; PyYAML may be installed without it.
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content: dict[str, Any] = yaml.load((FOLDER / name).read_text(encoding="utf-8"), Loader=loader)
    return content


def _load_rules() -> dict[str, Rule]:
    content = read_yaml("rules.yaml")
    return {
        code: Rule(code=code, **(entry | {"source": content["sources"][entry["source"]].strip()}))
        for code, entry in content["rules"].items()
    }


RULES: Mapping[str, Rule] = _load_rules()


@dataclass(frozen=True)
class Pool:
    """A worker pool as far as it could be read."""

    index: int
    spec: Mapping[str, Any]
    unread: frozenset[FieldPath]

    def at(self, *names: str | int) -> FieldPath:
        """Path of a field of this pool."""
        return (POOLS, self.index, *names)

    def knows(self, *names: str | int) -> bool:
        """Whether the field, set or not, holds nothing that could not be read."""
        return not is_unread(self.at(*names), self.unread)

    def get(self, *names: str) -> Any:
        """The field's value; None where it is not set."""
        value: Any = self.spec
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    @property
    def replica_count(self) -> int:
        return int(self.get("replica_count") or 0)

    @property
    def machine_type(self) -> str:
        return self.get("machine_spec", "machine_type") or ""

    @property
    def accelerator_type(self) -> str:
        """Empty for none, also where the API's name for "not given" is written."""
        name = self.get("machine_spec", "accelerator_type") or ""
        return "" if name == "ACCELERATOR_TYPE_UNSPECIFIED" else name

    @property
    def accelerator_count(self) -> int:
        return self.get("machine_spec", "accelerator_count") or 0

    @property
    def image_uri(self) -> str:
        return self.get("container_spec", "image_uri") or ""

    @property
    def is_reducers(self) -> bool:
        return is_reducers(self.spec)

    @property
    def is_tpu(self) -> bool:
        return self.accelerator_type.startswith("TPU_") or self.machine_type.startswith(_TPU_MACHINES)

    @property
    def is_node(self) -> bool:
        """Whether the pool's replicas train: the chief's and the workers'."""
        return self.index in (CHIEF_POOL, WORKER_POOL) and not self.is_reducers

    def tasks(self) -> Iterator[tuple[FieldPath, Mapping[str, Any]]]:
        """What the pool runs, container or Python package, with its path."""
        for name in ("container_spec", "python_package_spec"):
            if self.get(name):
                yield self.at(name), self.get(name)

    def environment(self) -> Iterator[tuple[FieldPath, str, str]]:
        """Path, name and value of each variable."""
        for path, task in self.tasks():
            for index, variable in enumerate(task.get("env") or ()):
                yield (*path, "env", index), variable.get("name", ""), variable.get("value", "")


@dataclass(frozen=True)
class Job:
    """A job's spec as far as it could be read, and where it is to run; an empty region means that nobody said."""

    spec: Mapping[str, Any]
    unread: frozenset[FieldPath]
    region: str
    catalog: Catalog

    @functools.cached_property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(Pool(index, spec, self.unread) for index, spec in enumerate(self.spec.get(POOLS, ())))

    def knows(self, *names: str) -> bool:
        """Whether the field, set or not, holds nothing that could not be read."""
        return not is_unread(names, self.unread)

    def scheduling(self, name: str) -> Any:
        """A field of `scheduling`; None where it is not set."""
        return self.spec.get("scheduling", {}).get(name)

    def machine(self, pool: Pool) -> Machine | None:
        """The catalogue's entry for the pool's machine."""
        return self.catalog.machines.get(pool.machine_type)

    @property
    def reducers(self) -> Pool | None:
        """The Reduction Server, if it is in its place."""
        pools = self.pools
        placed = len(pools) > REDUCTION_SERVER_POOL and pools[REDUCTION_SERVER_POOL].is_reducers
        return pools[REDUCTION_SERVER_POOL] if placed else None

    @property
    def num_nodes(self) -> int:
        """Replicas that train together."""
        return sum(pool.replica_count for pool in self.pools if pool.is_node)
