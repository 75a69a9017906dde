"""GPUs, machines and well-known models: facts in `catalog/*.yaml`, each with its source and the date it was read."""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from vlmpipe.config.yaml_loader import packaged_yaml
from vlmpipe.trainer.config.compiling import MIN_FOR_FLOAT8
from vlmpipe.trainer.nesting import object_at

FOLDER = Path(__file__).parent
MIB_PER_GIB = 1024
# Vertex AI says that its agents may take up to 40 % of an n1-standard-4's memory; the same is assumed of others.
CPU_SHARE = 0.6
REDUCER_GBPS = 32  # n1-highcpu-16 and n2-highcpu-16, the Reduction Server's machines in Vertex AI's documentation

# libyaml reads the files ten times faster; PyYAML may be installed without it.


@dataclass(frozen=True)
class Device:
    """A GPU as memory is planned on it; how fast it computes is not known."""

    device: str  # of the catalogue: word in the name that the driver gives it, such as H100; else the whole name
    memory_gib: float  # the total that the driver reports
    compute_capability: float

    @property
    def label(self) -> str:
        """Name in a plan."""
        return self.device

    @property
    def has_float8(self) -> bool:
        """Return whether this GPU multiplies matrices of 8-bit floats."""
        return self.compute_capability >= MIN_FOR_FLOAT8


@dataclass(frozen=True)
class Gpu(Device):
    """A GPU of the catalogue. Peaks are dense (without sparsity), of the tensor cores where the GPU has them."""

    accelerator_type: str
    bf16_tflops: float | None  # None: no bf16 units
    fp16_tflops: float | None
    fp32_tflops: float  # plain fp32, outside the tensor cores
    memory_gbytes_per_s: float
    link: str  # between the GPUs of a machine, for example "NVLink 4"
    link_gbytes_per_s: float  # of one GPU to the others, one direction
    flex_start: bool
    source: str
    date: str  # ISO 8601
    matmul_share: float  # of the peak, that matrix products sustain in training
    best_product_share: float  # of the peak, that a large product alone reaches
    attention_share: float  # the same of causal attention, for the pairs of tokens that it computes
    rates_from: str  # where the two shares come from, as the end of a sentence
    has_published_runs: bool  # to which the shares were fitted
    unconfirmed: tuple[str, ...] = ()  # fields without a document

    @property
    def label(self) -> str:
        """Name in a plan."""
        return self.accelerator_type


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One Compute Engine machine type as Vertex AI training offers it."""

    machine_type: str
    vcpus: int
    memory_gib: float
    accelerators: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # accelerator type -> possible counts
    accelerators_fixed: bool = False  # the GPUs are part of the machine
    nic_gbps: float  # for traffic between nodes (NCCL), whole machine, each direction
    local_ssd_gib: float = 0
    boot_disk_types: tuple[str, ...]
    spot: bool = True
    on_demand: bool = True  # sold without reservation at a list price; otherwise as Spot, flex-start or reserved
    needs_reservation: bool = False
    reduction_server: bool = False  # may be a GPU node of a job with a Reduction Server
    network: str = ""  # what NCCL uses between such machines (nccl.yaml); empty for machines without GPUs
    memory_share: float = CPU_SHARE  # of its memory, that a job may take
    source: str
    date: str  # ISO 8601
    unconfirmed: tuple[str, ...] = ()  # fields without a document

    @property
    def usable_bytes(self) -> int:
        """Memory that a job may take."""
        return int(self.memory_share * self.memory_gib * 2**30)

    @property
    def accelerator_type(self) -> str:
        """The built-in GPU; empty where GPUs are attached by choice, or none."""
        return next(iter(self.accelerators)) if self.accelerators_fixed else ""

    @property
    def accelerator_counts(self) -> tuple[int, ...]:
        """Counts of the built-in GPU; empty where GPUs are attached by choice, or none."""
        return self.accelerators[self.accelerator_type] if self.accelerators_fixed else ()


@dataclass(frozen=True)
class Catalog:
    """Machines and GPUs of Vertex AI training.

    `regions` is an upper bound: outside of them the GPU cannot be had, inside Vertex AI may still not offer it.
    """

    gpus: Mapping[str, Gpu]
    machines: Mapping[str, Machine]
    regions: Mapping[str, tuple[str, ...]]  # accelerator type -> regions
    tpu_hbm_gib: Mapping[str, float]  # family of TPU machines -> HBM of a chip

    def machines_with(self, accelerator_type: str) -> tuple[Machine, ...]:
        """Machine types that may carry this GPU."""
        return tuple(machine for machine in self.machines.values() if accelerator_type in machine.accelerators)

    def gpu_machine_like(self, tpu_machine: str) -> str:
        """The smallest on-demand machine with bf16 GPUs that has the TPU machine's HBM; the largest where none has."""
        hbm_gib = next((gib for family, gib in self.tpu_hbm_gib.items() if tpu_machine.startswith(family)), 16)
        chips = re.search(r"-([0-9]+)t$", tpu_machine)
        wanted_gib = hbm_gib * (int(chips[1]) if chips else 4)
        sizes = [
            (count * self.gpus[gpu].memory_gib, f"{machine.machine_type} with {count} x {gpu}")
            for machine in self.machines.values()
            for gpu, counts in machine.accelerators.items()
            for count in counts
            if self.gpus[gpu].bf16_tflops and machine.on_demand
        ]
        return min((size for size in sizes if size[0] >= wanted_gib), default=max(sizes))[1]


@dataclass(frozen=True)
class KnownModel:
    """A published model: the sizes in its config.json, and its number of parameters."""

    config: Mapping[str, object]
    parameters: int
    source: str
    date: str


@functools.cache
def load_catalog() -> Catalog:
    """GPUs, machines and regions from `machines.yaml`."""
    data = read_yaml("machines.yaml")
    gpus, machines = {}, {}
    for name, entry in entries_at(data, "gpus").items():
        memory_mib = entry.pop("memory_mib")
        assert isinstance(memory_mib, int), f"memory_mib of {name}"
        rates = object_at(data, "rates", str(entry.pop("rates")))
        named = {"accelerator_type": name, "memory_gib": memory_mib / MIB_PER_GIB}
        gpus[name] = {**named, **rates, **_with_source(entry, data)}
    for family in listed_at(data, "families"):
        for name, entry in entries_at(family, "machines").items():
            fields = {key: value for key, value in family.items() if key != "machines"} | entry
            if "accelerator" in fields:
                built_in = {fields.pop("accelerator"): (fields.pop("accelerator_count"),)}
                fields |= {"accelerators": built_in, "accelerators_fixed": True}
            machines[name] = {"machine_type": name, **_with_source(fields, data)}
    regions, hbm_gib = object_at(data, "regions", "by_accelerator"), data["tpu_hbm_gib"]
    content = {"gpus": gpus, "machines": machines, "regions": regions, "tpu_hbm_gib": hbm_gib}
    return TypeAdapter(Catalog).validate_python(content)


@functools.cache
def load_models() -> Mapping[str, KnownModel]:
    """Well-known towers and language models from `models.yaml`, by their id on the Hugging Face hub."""
    data = read_yaml("models.yaml")
    entries = {name: _with_source(entry, data) for name, entry in entries_at(data, "models").items()}
    return TypeAdapter(dict[str, KnownModel]).validate_python(entries)


def reducers_needed(nodes: int, nic_gbps: float) -> int:
    """Reducers whose bandwidth in total is at least that of the nodes."""
    return math.ceil(nodes * nic_gbps / REDUCER_GBPS)


def read_yaml(name: str, folder: Path = FOLDER) -> dict[str, object]:
    """Read a file of the catalog, or another file of its form."""
    data: dict[str, object] = packaged_yaml((folder / name).read_text(encoding="utf-8"))
    return data


def entries_at(data: Mapping[str, object], key: str) -> dict[str, dict[str, object]]:
    """The named entries below a key of one of the catalog's files."""
    return TypeAdapter(dict[str, dict[str, object]]).validate_python(data[key])


def listed_at(data: Mapping[str, object], key: str) -> list[dict[str, object]]:
    """The entries in a list of one of the catalog's files."""
    return TypeAdapter(list[dict[str, object]]).validate_python(data[key])


def source_at(data: Mapping[str, object], key: object) -> Mapping[str, object]:
    """A source that an entry names by its key, with its date as text. Raises KeyError for one that is not there."""
    source = object_at(data, "sources")[str(key)]
    assert isinstance(source, Mapping)
    return {**source, "date": str(source["date"])}


def _with_source(entry: Mapping[str, object], data: Mapping[str, object]) -> dict[str, object]:
    """`entry` with title and date of its source, which it names by a key of `sources`."""
    source = source_at(data, entry["source"])
    return {**entry, "source": source["title"], "date": source["date"]}


def unknown_region(location: str) -> str:
    """A warning for a region without known GPUs, else empty. New regions appear, so it is no error."""
    known = sorted({region for regions in load_catalog().regions.values() for region in regions})
    if location in known:
        return ""
    closest = difflib.get_close_matches(location, known, 1)
    hint = f": did you mean {closest[0]}?" if closest else ""
    return f"gcp.location {location} is no region that has GPUs{hint}"
