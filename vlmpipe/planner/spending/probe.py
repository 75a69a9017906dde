"""Expected measurements, duration and cost of a run's probes."""

from __future__ import annotations

from vlmpipe.catalog.machines import Gpu, load_catalog
from vlmpipe.catalog.prices import load_prices
from vlmpipe.config.run_config import RunConfig
from vlmpipe.job_spec.probe import ProbedMachine
from vlmpipe.planner.cost.estimate import Term, usd_per_hour
from vlmpipe.planner.spending.approval import Spending, dollars
from vlmpipe.planner.time.saving import SAVE_BYTES_PER_S
from vlmpipe.planner.time.transfers import LINK_SHARE
from vlmpipe.trainer.preflight.probe_plan import LIMIT_S, ProbePlan

HOURS = LIMIT_S / 3600
BUCKET_MIB = 256  # at 0.1 GB/s some three seconds each way


def probe_plan(machine: ProbedMachine, root_uri: str) -> ProbePlan:
    """Arguments of the probe."""
    cluster = machine.cluster
    gpu = load_catalog().gpus.get(cluster.accelerator_type)
    return ProbePlan(
        step=machine.step,
        jobs=machine.steps,
        machine=machine.named,
        accelerator_type=cluster.accelerator_type,
        accelerator_count=cluster.accelerator_count,
        product_tflops=_product_tflops(gpu),
        gpu_memory_gib=gpu.memory_gib if gpu else None,
        all_reduce_gbytes_per_s=gpu.link_gbytes_per_s * LINK_SHARE if gpu and cluster.processes > 1 else None,
        write_gbytes_per_s=SAVE_BYTES_PER_S / 1e9,
        bucket_mib=BUCKET_MIB,
        run_names=machine.trained if gpu else (),
        root_uri=root_uri,
        machine_check=cluster.machine_check,
    )


def _product_tflops(gpu: Gpu | None) -> float | None:
    """Return the TFLOPS of the best matrix product, of which the plan's rate is a share; None for an unknown GPU."""
    peak = (gpu.bf16_tflops or gpu.fp16_tflops) if gpu else None
    return gpu.best_product_share * peak if gpu and peak else None


def probe_usd(machine: ProbedMachine) -> tuple[float | None, tuple[str, ...]]:
    """US dollars of the probe's whole time, None with the prices that are missing."""
    cluster, config = machine.cluster, machine.config
    changes: dict[str, object] = {"cluster": cluster}
    if cluster.machine_type != config.cluster.machine_type:  # plan.machine is that of training
        changes["plan"] = config.plan.model_copy(update={"machine": type(config.plan.machine)()})
    alone = config.model_copy(update=changes)
    term: Term = cluster.scheduling_strategy
    rate, missing, _ = usd_per_hour(alone, load_prices(config.plan.prices_file), term, "evaluate")
    return (None if rate is None else rate * HOURS), missing


def probe_spending(config: RunConfig, machines: list[ProbedMachine]) -> Spending:
    """Hours and cost of all probes together, for the question before they are sent."""
    prices = [probe_usd(machine) for machine in machines]
    usd = [price for price, _ in prices if price is not None]
    missing = dict.fromkeys(name for _, names in prices for name in names)
    return Spending(
        name=f"the probe of {config.name}",
        state="green",
        errors=(),
        usd=sum(usd) if len(usd) == len(prices) else None,
        hours=HOURS * len(machines),
        machines=", then ".join(f"1 x {machine.named}" for machine in machines),
        term=machines[0].cluster.scheduling_strategy,
        unknown=f"no price of {', '.join(missing)}" if missing else "",
    )


def plan_line(spending: Spending) -> str:
    """The plan of the probes, in a line."""
    minutes = 60 * (spending.hours or 0.0)
    cost = f"at most {dollars(spending.usd)}" if spending.usd is not None else f"cost not known ({spending.unknown})"
    return f"plan: {spending.machines}; {minutes:.0f} minutes at most in all, {cost} on {spending.term}"
