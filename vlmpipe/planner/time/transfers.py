"""One kind of traffic between ranks: bytes of its collectives, and time on links and network cards.

Collectives are hierarchical: inside a node each GPU works on its part over the node's own links, and only then do nodes
exchange, so that a node's network card carries the same bytes however many GPUs stand behind it. NCCL's rings through
all GPUs come to nearly the same. For S bytes over n members, one member sends 2(n-1)/n S in an all-reduce and (n-1)/n S
in an all-gather or a reduce-scatter (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vlmpipe.catalog.machines import Gpu, Machine

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
Scope = Literal["intra", "inter"]
What = Literal["gradients", "weights", "activations"]

# Shares of the nominal bandwidth that large collectives reach. Published nccl-tests: 208-230 of 300 GB/s on NVLink 3
# (NVIDIA/nccl-tests#178, NVIDIA/nccl#583); between nodes 45-95 % on Google Cloud (NVIDIA/nccl#209, eight and one GPU a
# node; GoogleCloudPlatform/ai-infra-cluster-provisioning#376) and 85-96 % on InfiniBand (NVIDIA/nccl-tests#119).
LINK_SHARE = 0.75
NIC_SHARE = 0.7
# Seconds that a collective takes however small it is. Read: 48 to 51 us for 32 KiB to 1 MiB in a node of eight B200;
# between nodes 46 us on InfiniBand (NVIDIA/nccl#1244, two nodes) to 380 us on EFA (ml-engineering, four nodes).
LINK_LATENCY_S = 50e-6
NIC_LATENCY_S = 130e-6


@dataclass(frozen=True)
class Transfer:
    """One kind of traffic of a step, over one scope."""

    what: What
    collective: Collective
    scope: Scope
    # The whole tensor that one group of ranks works on, of an all-to-all that of one rank; summed over the step.
    payload_bytes: float
    bytes_per_rank: float  # sent by one GPU; between nodes, its share of the node's network card
    bytes_per_nic: float  # sent by a node's network card; 0 inside a node
    calls: float = 1.0  # collectives of the step
    of_node: bool = False  # of a group that lies in one node, beside the same collective over all ranks

    @property
    def name(self) -> str:
        return f"{self.collective.replace('_', '-')} of {self.what}" + (" within nodes" if self.of_node else "")


@dataclass(frozen=True)
class RankGroup:
    """`size` ranks, `stride` apart, that work together; all such groups of the job do the same at the same time."""

    size: int
    stride: int
    ranks_per_node: int

    @property
    def ranks_in_node(self) -> int:
        return min(self.size, max(1, self.ranks_per_node // self.stride))

    @property
    def nodes(self) -> int:
        return -(-self.size // self.ranks_in_node)

    def collective(
        self, what: What, collective: Collective, payload_bytes: float, calls: float = 1.0
    ) -> Iterator[Transfer]:
        """The traffic of `calls` collectives, inside nodes and between them; nothing for a group of one."""
        passes = 2 if collective == "all_reduce" else 1
        if self.ranks_in_node > 1:
            sent = passes * (self.ranks_in_node - 1) / self.ranks_in_node * payload_bytes
            yield Transfer(what, collective, "intra", payload_bytes, sent, 0.0, calls)
        if self.nodes > 1:
            sent = passes * (self.nodes - 1) / self.nodes * payload_bytes / self.ranks_in_node
            yield Transfer(what, collective, "inter", payload_bytes, sent, sent * self.ranks_per_node, calls)

    def all_to_all(self, what: What, payload_bytes: float, calls: float) -> Iterator[Transfer]:
        """Yield the transfers of an all-to-all of `payload_bytes` per rank, in equal parts to the other ranks."""
        sent_by_rank = payload_bytes / self.size
        if self.ranks_in_node > 1:
            yield Transfer(
                what, "all_to_all", "intra", payload_bytes, sent_by_rank * (self.ranks_in_node - 1), 0.0, calls
            )
        if self.nodes > 1:
            sent = sent_by_rank * (self.size - self.ranks_in_node)
            yield Transfer(what, "all_to_all", "inter", payload_bytes, sent, sent * self.ranks_per_node, calls)


def seconds(transfer: Transfer, machine: Machine, gpu: Gpu) -> float:
    """Time on the links inside a node, or on its network card, at the assumed shares of their bandwidth."""
    if transfer.scope == "intra":
        return transfer.calls * LINK_LATENCY_S + link_seconds(transfer.bytes_per_rank, gpu)
    return transfer.calls * NIC_LATENCY_S + transfer.bytes_per_nic / (machine.nic_gbps / 8 * 1e9 * NIC_SHARE)


def link_seconds(bytes_per_rank: float, gpu: Gpu) -> float:
    """Time that these bytes take on a GPU's links to the others of its node."""
    return bytes_per_rank / (gpu.link_gbytes_per_s * 1e9 * LINK_SHARE)
