"""Part `search`: CPU seconds of `plan --suggest` over 64 to 4,096 GPUs, for a model whose traces are kept."""

from __future__ import annotations

import time
from functools import partial

from benchmarks.planner.commands import PLANNED
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.config.overrides import apply_overrides
from vlmpipe.config.run_config import RunConfig, load_run_file, parse_run_config
from vlmpipe.planner.plan import plan_basis
from vlmpipe.planner.search.search import suggest
from vlmpipe.planner.search.ways import Goal

BUDGET_S = 5.0
NODES = (8, 64, 512)


def search(bench: Bench) -> None:
    """Each size in turn. The first round, which traces, is not counted."""
    found = bench.take_turns("searches", {f"{8 * nodes:,} GPUs": partial(search_s, on_nodes(nodes)) for nodes in NODES})
    for name, values in found.items():
        bench.report.figure("plan --suggest, traces kept", f"LLaVA 7B, {name}", "CPU s", Side("cheapest", values))
    slowest_s = max(min(values) for values in found.values())
    bench.report.require(slowest_s <= BUDGET_S, f"a search takes {BUDGET_S:g} CPU s at most", found=f"{slowest_s:.1f}")


def on_nodes(nodes: int) -> RunConfig:
    changes = {"cluster.replica_count": nodes, "train.global_batch_size": 8 * max(NODES), "train.micro_batch_size": 1}
    return parse_run_config(apply_overrides(load_run_file(PLANNED).to_dict(), changes), PLANNED)


def search_s(config: RunConfig) -> float:
    before_s = time.process_time()
    suggest(config, *plan_basis(config), Goal("cheapest"))
    return time.process_time() - before_s
