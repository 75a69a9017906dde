"""NCCL's transport between nodes and its environment variables, by machine: facts in `catalog/nccl.yaml`.

`python -m vlmpipe.catalog.nccl` writes the reference page.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import dataclass

from vlmpipe.catalog.machines import Machine, load_catalog, read_yaml

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

NET_VARIABLE = "NCCL_NET"  # forces one network by name
NO_PLUGIN = "none"
HEADER = """# NCCL between nodes

The network plugin and transport that NCCL uses between the nodes of a job, by machine type, and the environment
variables that suit it.

- No variable is set automatically. Most machines need none; on the others the variables belong to a version of a
  plugin that is not in the trainer image.
- Variables in `cluster.env` are passed on unchanged.
- A plan of several GPU nodes says which plugin to expect. With `NCCL_DEBUG: INFO` in `cluster.env`, NCCL logs the
  network that it uses (`Using network ...`).
- Between the GPUs of one machine NCCL uses NVLink or PCIe, whatever the network.

None of this has been observed on a GPU machine of Google Cloud.

This page is generated from `vlmpipe/catalog/nccl.yaml` and `machines.yaml`:
`python -m vlmpipe.catalog.nccl > docs/reference/nccl.md`. A test compares it with them.

## Transport by machine

| machines | plugin | transport | sources |
|---|---|---|---|
"""
REASONS = """
No variable is set on any of them:

| plugin | why | not confirmed |
|---|---|---|
"""
MISFITS = """
## Variables that suit some machines only

`vlmpipe check` warns about these variables on machines that they do not suit ([rules](job-spec-rules.md)).

| variables | of | no warning on | why a warning elsewhere | rule | sources |
|---|---|---|---|---|---|
"""
FOOTER = """
- `NCCL_IB_DISABLE=1` causes no warning: it disables a network that is not there.
- A3 Edge is not in the list, because Vertex AI's documentation does not offer it.

## Sources

| | document | date |
|--:|---|---|
"""


@dataclass(frozen=True)
class Source:
    """A document, with its own date or that of reading it."""

    title: str
    url: str
    date: str


@dataclass(frozen=True)
class Network:
    """NCCL's transport between nodes. `why` is the reason for setting no variable."""

    plugin: str  # "none" for NCCL's own sockets
    carries: str
    why: str
    sources: tuple[Source, ...]
    unconfirmed: str = ""  # without a document


@dataclass(frozen=True)
class Misfit:
    """Variables that suit some networks only."""

    of: str
    suits: tuple[str, ...]  # networks
    why: str
    rule: str  # that warns of them elsewhere
    sources: tuple[Source, ...]
    names: tuple[str, ...] = ()  # patterns
    net: tuple[str, ...] = ()  # patterns of NCCL_NET's value
    harmless: Mapping[str, str] = field(default_factory=dict)  # name -> value

    def means(self, name: str, value: str) -> bool:
        """Whether the variable is one of these, with a value that asks for something."""
        if name == NET_VARIABLE:
            return any(fnmatchcase(value, pattern) for pattern in self.net)
        return self.harmless.get(name) != value and any(fnmatchcase(name, pattern) for pattern in self.names)


@functools.cache
def load_networks() -> Mapping[str, Network]:
    """Networks by the name that machines.yaml gives them."""
    data = read_yaml("nccl.yaml")
    return {name: Network(**_with_sources(entry, data)) for name, entry in data["networks"].items()}


@functools.cache
def load_misfits() -> tuple[Misfit, ...]:
    """Variables that suit some networks only."""
    data = read_yaml("nccl.yaml")
    return tuple(Misfit(**_with_sources(entry, data)) for entry in data["variables"])


def expected(config: RunConfig, machine: Machine) -> str:
    """The network plugin of the training job, in a sentence; empty where no GPUs exchange data between nodes."""
    cluster = config.cluster
    if not machine.network or not cluster.accelerator_count or cluster.replica_count < 2:
        return ""
    if cluster.reduction_server:
        return (
            "the Reduction Server's, in an image that was built with REDUCTION_SERVER=1; metrics say whether it is used"
        )
    network = load_networks()[machine.network]
    variables = "no variable is needed" if network.plugin == NO_PLUGIN else "no variable is set"
    doubt = f". Not confirmed: {network.unconfirmed}" if network.unconfirmed else ""
    return f"{network.plugin} ({network.carries}); {variables}{doubt}"


def markdown() -> str:
    """The reference page."""
    return "".join([HEADER, *_networks(), REASONS, *_reasons(), MISFITS, *_misfits(), FOOTER, *_sources()])


def _networks() -> Iterator[str]:
    for name, network in load_networks().items():
        yield f"| {_families(name)} | {network.plugin} | {network.carries} | {_numbers(network)} |\n"


def _reasons() -> Iterator[str]:
    for network in load_networks().values():
        yield f"| {network.plugin} | {network.why} | {network.unconfirmed or '–'} |\n"


def _misfits() -> Iterator[str]:
    for misfit in load_misfits():
        names = [f"`{name}`" for name in misfit.names] + [f"`{NET_VARIABLE}={value}`" for value in misfit.net]
        suits = ", ".join(map(_families, misfit.suits)) or "none"
        yield f"| {', '.join(names)} | {misfit.of} | {suits} | {misfit.why} | {misfit.rule} | {_numbers(misfit)} |\n"


def _sources() -> Iterator[str]:
    for number, source in enumerate(_all_sources(), 1):
        yield f"| {number} | [{source.title}]({source.url}) | {source.date} |\n"


def _numbers(entry: Network | Misfit) -> str:
    """The entry's sources by their numbers in the list of sources."""
    numbers = {source: number for number, source in enumerate(_all_sources(), 1)}
    return ", ".join(f"[{numbers[source]}](#sources)" for source in entry.sources)


def _all_sources() -> list[Source]:
    """Every source once, in the order of its first use."""
    entries: list[Network | Misfit] = [*load_networks().values(), *load_misfits()]
    return list(dict.fromkeys(source for entry in entries for source in entry.sources))


def _families(network: str) -> str:
    """Machine types with this network, those of a family that all have it as one."""
    catalog = load_catalog().machines.values()
    found = []
    for machine in catalog:
        if machine.network == network:
            family = machine.machine_type.rpartition("-")[0]
            whole = {other.network for other in catalog if other.machine_type.startswith(f"{family}-")} == {network}
            name = f"{family}-*" if whole else machine.machine_type
            found.append(f"{name} (not confirmed)" if "network" in machine.unconfirmed else name)
    return ", ".join(dict.fromkeys(found))


def _with_sources(entry: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """`entry` with the sources that it names by keys of `sources`."""
    sources = [data["sources"][name] for name in entry["sources"]]
    return {**entry, "sources": [{**source, "date": str(source["date"])} for source in sources]}


if __name__ == "__main__":
    print(markdown(), end="")
