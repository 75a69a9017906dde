"""The machine for which a month of serving is stated where a run deploys nothing: the cheapest that holds its model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmpipe.catalog.machines import Gpu, load_catalog
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.sections.deploy import DeployConfig
from vlmpipe.config.vllm import load_vllm
from vlmpipe.trainer.hooks.rules import obstacles_to
from vlmpipe.trainer.sizing.model_shape import ModelShape

if TYPE_CHECKING:
    from vlmpipe.catalog.prices import Prices

WEIGHTS_SHARE = 0.7  # of the GPUs' memory, that weights may take: vLLM takes 0.9 of it, the rest for keys and values
MIB_PER_GIB = 1024


def serving_obstacle(config: RunConfig) -> str:
    """Why no endpoint could serve the run's model, as a clause; empty where nothing is known against it."""
    return next(iter(obstacles_to("endpoint", config)), "")


def cheapest_deploy(config: RunConfig, shape: ModelShape, prices: Prices) -> DeployConfig | None:
    """The section deploy with the cheapest machine in the run's region; None where no machine that holds it has a
    price.
    """
    region = config.gcp.location
    known = list[tuple[float, DeployConfig]]()
    for deploy in _able(config, shape):
        gpus = deploy.accelerator_type, deploy.accelerator_count
        quote = prices.machine(deploy.machine_type, *gpus, region, "standard")
        if quote.usd_per_hour is not None:
            known.append((quote.usd_per_hour, deploy))
    return min(known, key=lambda pair: pair[0])[1] if known else None


def _able(config: RunConfig, shape: ModelShape) -> Iterator[DeployConfig]:
    """On-demand machines with one to eight GPUs that hold the weights, and more memory than a server shares."""
    needed_bytes = shape.total_parameters * (2 if config.train.precision == "bf16" else 4)  # as deploy serves them
    catalog = load_catalog()
    for machine in catalog.machines.values():
        for name, counts in machine.accelerators.items():
            gpu = catalog.gpus[name]
            for count in counts if machine.on_demand and _computes(gpu, config.train.precision) else ():
                deploy = DeployConfig(
                    endpoint="model", machine_type=machine.machine_type, accelerator_type=name, accelerator_count=count
                )
                holds = needed_bytes <= WEIGHTS_SHARE * count * gpu.memory_gib * 2**30
                if holds and machine.memory_gib * MIB_PER_GIB > deploy.shared_memory_size_mb:
                    yield deploy


def _computes(gpu: Gpu, precision: str) -> bool:
    """Return whether vLLM serves in this precision on the GPU."""
    return precision != "bf16" or gpu.compute_capability >= load_vllm().min_bf16_capability
