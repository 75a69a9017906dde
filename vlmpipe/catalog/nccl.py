"""NCCL's transport between nodes and its environment variables, by machine: facts in `catalog/nccl.yaml`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from vlmpipe.catalog.machines import Machine, entries_at, listed_at, read_yaml, source_at

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

NET_VARIABLE = "NCCL_NET"  # forces one network by name
NO_PLUGIN = "none"


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
        """Return whether the variable is one of these, with a value that asks for something."""
        if name == NET_VARIABLE:
            return any(fnmatchcase(value, pattern) for pattern in self.net)
        return self.harmless.get(name) != value and any(fnmatchcase(name, pattern) for pattern in self.names)


@functools.cache
def load_networks() -> Mapping[str, Network]:
    """Networks by the name that machines.yaml gives them."""
    data = read_yaml("nccl.yaml")
    entries = {name: _with_sources(entry, data) for name, entry in entries_at(data, "networks").items()}
    return TypeAdapter(dict[str, Network]).validate_python(entries)


@functools.cache
def load_misfits() -> tuple[Misfit, ...]:
    """Variables that suit some networks only."""
    data = read_yaml("nccl.yaml")
    entries = [_with_sources(entry, data) for entry in listed_at(data, "variables")]
    return TypeAdapter(tuple[Misfit, ...]).validate_python(entries)


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


def _with_sources(entry: Mapping[str, object], data: Mapping[str, object]) -> dict[str, object]:
    """`entry` with the sources that it names by keys of `sources`."""
    names = entry["sources"]
    assert isinstance(names, list)
    return {**entry, "sources": [source_at(data, name) for name in names]}
