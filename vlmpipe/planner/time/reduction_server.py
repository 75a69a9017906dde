"""Check whether a Reduction Server makes a run cheaper, and with how many reducers.

Rules and figures are those of Vertex AI's documentation of the Reduction Server, read in November 2026; the gain is
derived. A network card of N nodes carries 2(N-1)/N of the gradients in each direction for a ring all-reduce, and 1 of
them when reducers sum: g = 2(N-1)/N times faster, so 1 at two nodes and never more than 2. If f is the share of a step
in which the ring is waited for, the step becomes 1 / (1 - f + f/g) times as fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vlmpipe.catalog.machines import REDUCER_GBPS, Machine, reducers_needed
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.parallel_layout import Layout
from vlmpipe.planner.time.step_time import Time

if TYPE_CHECKING:
    from vlmpipe.catalog.prices import Prices

DEFAULT_REDUCER = "n1-highcpu-16"
ELIGIBLE = {
    "ddp": "all of its gradients",
    "zero1": "its gradients, not the weights that it gathers",
    "zero2": "its gradients, not the weights that it gathers",
    "hsdp": "the sums across nodes",
}
# The newer machines bring network plugins of their own (TCPXO, gIB), and NCCL runs one plugin at a time.
OWN_PLUGIN = ("a3-megagpu", "a3-ultragpu", "a4-", "a4x-")
UNDOCUMENTED = ("a3-highgpu", "a3-edgegpu")


@dataclass(frozen=True)
class Advice:
    """Prices are per hour of the run with reducers; None where a price or a time is not known."""

    state: Literal["pays", "does not pay", "not possible", "unknown"]
    reducers: int | None = None  # that match the nodes' bandwidth
    speedup: float | None = None  # of a step, with the reducers of the run file, or else with `reducers`
    extra_usd_per_hour: float | None = None  # price of the reducers
    saved_usd_per_hour: float | None = None  # price of the nodes' time that they save
    why: str = ""


def all_reduce_gain(nodes: int, nic_gbps: float, reducers: int) -> float:
    """Speedup of all-reduce by reducers; below 1 if too few of them are the bottleneck."""
    return 2 * (nodes - 1) / nodes * min(1.0, reducers * REDUCER_GBPS / (nodes * nic_gbps))


def step_gain(exposed_share: float, gain: float) -> float:
    """Speedup of a step if `exposed_share` of it becomes `gain` times faster."""
    return 1 / (1 - exposed_share + exposed_share / gain)


def advise(config: RunConfig, layout: Layout, time: Time, machine: Machine, prices: Prices) -> Advice:
    """Weigh the run file's reducers, or else as many as match the nodes, for the training job."""
    if refusal := _refusal(config, layout, machine):
        return Advice("not possible", why=refusal)
    nodes = layout.nodes
    needed = reducers_needed(nodes, machine.nic_gbps)
    requested = config.cluster.reduction_server
    reducers = requested.replica_count if requested and isinstance(requested.replica_count, int) else needed
    if machine.machine_type.startswith(UNDOCUMENTED):
        why = f"nothing documents a Reduction Server with {machine.machine_type}: the log of a first run must show it"
        return Advice("unknown", needed, why=why)
    if time.step_s is None:
        return Advice("unknown", needed, why="the time of a step is not known")
    gain = all_reduce_gain(nodes, machine.nic_gbps, reducers)
    speedup = step_gain(time.exposed_all_reduce_s / time.step_s, gain)
    few = ""
    if reducers < needed:
        few = f"; {reducers} reducers pass {reducers * REDUCER_GBPS} of {nodes * machine.nic_gbps:g} Gbit/s, "
        few += f"{needed} pass all"
    if speedup <= 1:
        reason = "two nodes send no more in a ring" if nodes == 2 else "no step waits for a sum of gradients"
        if gain < 1:
            reason = "too few reducers slow the nodes down"
        return Advice("does not pay", needed, speedup, why=reason + few)
    return _weigh(config, layout, prices, needed, reducers, speedup, few)


def _refusal(config: RunConfig, layout: Layout, machine: Machine) -> str:
    cluster = config.cluster
    if not cluster.accelerator_count:
        return "it works through NCCL, which needs GPUs"
    if layout.strategy not in ELIGIBLE:
        return f"{layout.strategy} has no all-reduce over all its ranks, which is all that reducers do"
    if layout.nodes < 2:
        return "there is one node, so nothing is summed over the network"
    if "flex_start" in cluster.strategies:
        return "flex_start needs the same machine in all pools"
    if machine.machine_type.startswith(OWN_PLUGIN):
        return f"{machine.machine_type} has a network plugin of its own, and NCCL runs one plugin at a time"
    if not machine.reduction_server and not machine.machine_type.startswith(UNDOCUMENTED):
        return f"{machine.machine_type} is no machine for it"
    return ""


def _weigh(
    config: RunConfig, layout: Layout, prices: Prices, needed: int, reducers: int, speedup: float, few: str
) -> Advice:
    cluster, region = config.cluster, config.gcp.location
    reducer_type = cluster.reduction_server.machine_type if cluster.reduction_server else DEFAULT_REDUCER
    node = prices.machine(
        cluster.machine_type, cluster.accelerator_type, cluster.accelerator_count, region, cluster.scheduling_strategy
    )
    reducer = prices.machine(reducer_type, "", 0, region, cluster.scheduling_strategy)
    extra = None if reducer.usd_per_hour is None else reducers * reducer.usd_per_hour
    saved = None if node.usd_per_hour is None else layout.nodes * node.usd_per_hour * (speedup - 1)
    what = f"{reducers} reducers make a step {speedup:.2f} times as fast ({ELIGIBLE[layout.strategy]})"
    if extra is None or saved is None:
        missing = ", ".join(dict.fromkeys((*node.missing, *reducer.missing)))
        return Advice("unknown", needed, speedup, extra, saved, f"{what}; no price is known for {missing}{few}")
    old = "; prices are old" if node.old or reducer.old else ""
    if lacking := (*node.missing, *reducer.missing):
        few += f"; the prices lack {', '.join(lacking)}"
    weighed = f"{what} and cost ${extra:,.2f} an hour to save ${saved:,.2f}{few}{old}"
    return Advice("pays" if saved > extra else "does not pay", needed, speedup, extra, saved, weighed)
