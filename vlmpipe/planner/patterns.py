"""Communication of each pattern of distributed training in a step, and when a pattern is the fastest.

Bytes are those of the busiest network card in its busier direction; cards send and receive at the same time. S is the
size of the gradients, N the number of nodes, g the GPUs of a node, P the number of parameter servers.

ring                2 (N-1)/N S     Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"; Horovod too:
                                    Sergeev and Del Balso 2018, "Horovod: fast and easy distributed deep learning"
hierarchical        2 (N-1)/N S     a node's GPUs sum first, 2 (g-1)/g S on their own links (transfers.py)
fully sharded       3 (N-1)/N S     two all-gathers and a reduce-scatter: Rajbhandari et al. 2020, "ZeRO", section 7
parameter servers   max(1, N/P) S   a worker sends S and receives S, a server N S/P of each: Li et al. 2014, "Scaling
                                    distributed machine learning with the parameter server"; Jiang et al. 2020, "A
                                    unified architecture for accelerating distributed DNN training" (BytePS)

How far an asynchronous worker gets: Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel
parameter server". Print the docs' table: python -m vlmpipe.planner.patterns
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vlmpipe.planner.time.transfers import NIC_SHARE

SENT_SHARE = {"float32": 1.0, "float16": 0.5}  # of fp32 gradients; Horovod's and DDP's compression halves them


def ring_bytes(gradient_bytes: float, nodes: int) -> float:
    """All-reduce in a ring, or of a hierarchy between its nodes: DDP, ZeRO 1 and 2 together with Horovod."""
    return 2 * (nodes - 1) / nodes * gradient_bytes


def flat_ring_bytes(gradient_bytes: float, nodes: int, gpus_per_node: int) -> float:
    """One ring through all GPUs, which crosses each card once: nearly twice the hierarchy's bytes on two nodes."""
    return ring_bytes(gradient_bytes, nodes * gpus_per_node)


def sharded_bytes(gradient_bytes: float, nodes: int) -> float:
    """Fully sharded parameters, gathered forward and backward, with gradients as large as the parameters."""
    return 3 * (nodes - 1) / nodes * gradient_bytes


def server_bytes(gradient_bytes: float, workers: int, servers: int) -> float:
    """Parameter servers on machines of their own: the workers' cards, or the servers' where those are few."""
    return max(1.0, workers / servers) * gradient_bytes


def servers_that_match(workers: int) -> int | None:
    """The fewest servers with which a step sends less than a ring does; None where no number does (two workers)."""
    return next(
        (count for count in range(1, workers + 1) if server_bytes(1, workers, count) < ring_bytes(1, workers)), None
    )


def synchronous_rate(step_s: Sequence[float]) -> float:
    """Micro-batches a second of workers that wait for each other, by each one's seconds for a micro-batch."""
    return len(step_s) / max(step_s)


def asynchronous_rate(step_s: Sequence[float], staleness: float) -> float:
    """Return micro-batches per second of workers that do not wait; with bounded staleness, of workers that wait.

    `staleness`: updates that the fastest may be ahead; math.inf for no bound.
    """
    return sum(1 / seconds for seconds in step_s) if math.isinf(staleness) else synchronous_rate(step_s)


@dataclass(frozen=True)
class Choice:
    """A pattern on given machines: how fast, and at what price."""

    pattern: str
    micro_batches_per_s: float
    usd_per_million: float  # micro-batches


def choices(
    gradient_bytes: float,
    compute_s: Sequence[float],
    *,
    nic_gbps: float,
    node_usd_per_hour: float,
    servers: int,
    server_usd_per_hour: float,
) -> list[Choice]:
    """DDP beside `servers` parameter servers, synchronous and without a bound; the cheapest first.

    Args:
        compute_s: seconds that each node computes on a micro-batch. Nothing is overlapped with communication: where
            DDP hides its all-reduce behind backward, it does better than this says.
        nic_gbps: of nodes and servers, Gbit/s in each direction.
    """
    nodes = len(compute_s)
    ring_s = _seconds(ring_bytes(gradient_bytes, nodes), nic_gbps)
    # A worker sends gradients, and then receives parameters: one after the other.
    servers_s = 2 * _seconds(server_bytes(gradient_bytes, nodes, servers), nic_gbps)
    price, more = nodes * node_usd_per_hour, servers * server_usd_per_hour
    with_servers = [seconds + servers_s for seconds in compute_s]
    rates = {
        "ddp": (synchronous_rate([seconds + ring_s for seconds in compute_s]), price),
        "servers, synchronous": (synchronous_rate(with_servers), price + more),
        "servers, asynchronous": (asynchronous_rate(with_servers, math.inf), price + more),
    }
    choices = [Choice(name, rate, usd / 3600 / rate * 1e6) for name, (rate, usd) in rates.items()]
    return sorted(choices, key=lambda choice: choice.usd_per_million)


def _seconds(sent_bytes: float, nic_gbps: float) -> float:
    return sent_bytes * 8 / (NIC_SHARE * nic_gbps * 1e9)


def table() -> str:
    """The decision table of docs/reference/training-patterns.md, in Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    counts = (2, 4, 8, 16)
    columns = " | ".join(f"{nodes} nodes" for nodes in counts)
    yield f"| pattern | {columns} | pays when |"
    yield f"|---|{'--:|' * len(counts)}---|"

    def row(name: str, values: Sequence[float], when: str) -> str:
        return f"| {name} | {' | '.join(f'{value:.2f} S' for value in values)} | {when} |"

    yield row(
        "DDP, Horovod: hierarchical, or a GPU a node",
        [ring_bytes(1, n) for n in counts],
        "the default: the model fits on a GPU",
    )
    half = SENT_SHARE["float16"]
    yield row(
        "the same, fp16 compression", [half * ring_bytes(1, n) for n in counts], "gradients are fp32, the network slow"
    )
    yield row("a flat ring, 8 GPUs a node", [flat_ring_bytes(1, n, 8) for n in counts], "never: sum in nodes first")
    yield row("FSDP, ZeRO-3", [sharded_bytes(1, n) for n in counts], "the model does not fit on a GPU")
    yield row("parameter server, 1", [server_bytes(1, n, 1) for n in counts], "never for bandwidth")
    needed = [servers_that_match(n) for n in counts]
    yield row(
        "parameter servers, as many as workers", [server_bytes(1, n, n) for n in counts],
        "workers come, go and differ in speed; or CPU machines are cheap",
    )  # fmt: skip
    fewest = " | ".join("none" if count is None else f"{count}" for count in needed)
    yield f"| fewest servers that send less than a ring | {fewest} | |"


if __name__ == "__main__":
    print(table())
