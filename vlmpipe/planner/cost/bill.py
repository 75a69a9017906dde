"""A run's bill: all that it costs, for a million tokens and a thousand samples, and a month of serving next to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.catalog.managed_offers import ManagedRange, Method, text_only_range
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.sections.cloud_run import load_cloud_run
from vlmpipe.config.sections.deploy import DeployConfig
from vlmpipe.planner.cost.estimate import Cost
from vlmpipe.planner.cost.serving_machine import cheapest_deploy, serving_obstacle
from vlmpipe.planner.cost.serving_places import ServingPlaces, instance_name, instance_quote, serving_places
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.steps.estimate import HOURS_PER_MONTH
from vlmpipe.trainer.sizing.model_shape import ModelShape
from vlmpipe.trainer.storage.base import in_bucket

if TYPE_CHECKING:
    from vlmpipe.catalog.prices import Prices, Quote

MOSTLY_TRAINED = 0.5  # share of the weights from which a training without adapters compares with full tuning


@dataclass(frozen=True)
class ServingCost:
    """An endpoint's replicas by deploy: standard machines of training with Vertex AI's fee, or instances of Cloud Run.

    None: not known, and `missing` names the prices.
    """

    machines: str  # of one replica
    min_replicas: int
    max_replicas: int
    usd_per_month: float | None  # of min_replicas, which are billed while no question comes too
    most_usd_per_month: float | None  # of max_replicas
    missing: tuple[str, ...]
    usd_per_wake: float | None = None  # of a sleeping endpoint: a replica until it sleeps again after one question


@dataclass(frozen=True)
class Bill:
    """All costs of a run. None: not known."""

    usd: float | None  # jobs, steps and their disks, on the run's term
    requests_usd: float | None  # of training to its buckets
    network_usd: float | None
    storage_usd_per_month: float | None
    is_lower_bound: bool
    tokens: float | None  # trained in all passes, without padding
    samples: float | None
    serving: ServingCost | None  # None: the run deploys nothing
    managed: ManagedRange | None  # None: nothing comparable is sold
    places: ServingPlaces | None = None  # None: the run deploys nothing
    if_deployed: ServingCost | None = None  # of a run without deploy: on the cheapest machine for its model
    not_deployable: str = ""  # why `if_deployed` is None of such a run, as a clause

    @property
    def whole_usd(self) -> float | None:
        """Jobs, steps, requests and network, as far as they are known; None without jobs and steps."""
        return None if self.usd is None else self.usd + (self.requests_usd or 0.0) + (self.network_usd or 0.0)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            **dataclasses.asdict(self),
            "whole_usd": self.whole_usd,
            "usd_per_million_tokens": _per(self.whole_usd, self.tokens, 1e6),
            "usd_per_thousand_samples": _per(self.whole_usd, self.samples, 1e3),
        }


def bill_of(case: Scenario, cost: Cost, prices: Prices, *, is_last: bool = True) -> Bill:
    """The bill of one training with its pipeline; no month of serving where another stage follows it."""
    config, load = case.config, case.load
    sequences = None if load.steps is None else load.steps * load.sequences_per_step
    if_deployed, obstacle = (None, "") if config.deploy or not is_last else _if_deployed(config, case.shape, prices)
    return Bill(
        usd=cost.usd,
        requests_usd=cost.requests.usd if cost.requests else None,
        network_usd=_network_usd(config),
        storage_usd_per_month=cost.storage_usd_per_month,
        is_lower_bound=cost.is_lower_bound,
        tokens=None if sequences is None else sequences * load.useful_tokens_per_sequence,
        samples=None if sequences is None else sequences * load.samples_per_sequence,
        serving=serving_cost(config, prices),
        managed=_managed(config, case.shape),
        places=serving_places(case, prices),
        if_deployed=if_deployed,
        not_deployable=obstacle,
    )


def _if_deployed(config: RunConfig, shape: ModelShape, prices: Prices) -> tuple[ServingCost | None, str]:
    """A month of serving that the run does not ask for, or why none can be stated."""
    if obstacle := serving_obstacle(config):
        return None, obstacle
    if deploy := cheapest_deploy(config, shape, prices):
        return serving_cost(config.model_copy(update={"deploy": deploy}), prices), ""
    return None, f"no machine that holds the model has a price in {config.gcp.location}"


def bill_of_stages(bills: Sequence[Bill]) -> Bill:
    """The sums over trainings that follow each other; of storage each keeps its own, and the last one is served."""
    return Bill(
        usd=_total(bills, lambda bill: bill.usd),
        requests_usd=_total(bills, lambda bill: bill.requests_usd),
        network_usd=_total(bills, lambda bill: bill.network_usd),
        storage_usd_per_month=_total(bills, lambda bill: bill.storage_usd_per_month),
        is_lower_bound=any(bill.is_lower_bound for bill in bills),
        tokens=_total(bills, lambda bill: bill.tokens),
        samples=_total(bills, lambda bill: bill.samples),
        serving=next((bill.serving for bill in bills if bill.serving), None),
        managed=bills[-1].managed if all(bill.managed for bill in bills) else None,
        places=bills[-1].places,
        if_deployed=bills[-1].if_deployed,
        not_deployable=bills[-1].not_deployable,
    )


def bill_of_sweep(
    usd: float | None, storage_usd_per_month: float | None, shared: Sequence[Bill], trainings: Sequence[Bill]
) -> Bill:
    """The bill of all trainings of a sweep.

    Args:
        usd: of the whole sweep.
        storage_usd_per_month: likewise.
        shared: of each stage of the run file without its sweep; the last one is trained by the sweep in its place.
        trainings: of each training, of all starts.
    """
    trained = [*shared[:-1], *trainings]
    return Bill(
        usd=usd,
        requests_usd=_total(trained, lambda bill: bill.requests_usd),
        network_usd=_total([*shared, *trainings], lambda bill: bill.network_usd),
        storage_usd_per_month=storage_usd_per_month,
        is_lower_bound=any(bill.is_lower_bound for bill in [*shared, *trainings]),
        tokens=_total(trained, lambda bill: bill.tokens),
        samples=_total(trained, lambda bill: bill.samples),
        serving=None,
        managed=shared[-1].managed if all(bill.managed for bill in trained) else None,
        if_deployed=shared[-1].if_deployed,
        not_deployable=shared[-1].not_deployable,
    )


def _total(bills: Sequence[Bill], of: Callable[[Bill], float | None]) -> float | None:
    known = [value for value in map(of, bills) if value is not None]
    return sum(known) if len(known) == len(bills) else None


def serving_cost(config: RunConfig, prices: Prices) -> ServingCost | None:
    """Cost of the replicas of deploy; None without deploy."""
    deploy = config.deploy
    if deploy is None:
        return None
    machines, quote, idle_minutes = _replica(deploy, config.gcp.location, prices)
    month = None if quote.usd_per_hour is None else quote.usd_per_hour * HOURS_PER_MONTH
    return ServingCost(
        machines=machines,
        min_replicas=deploy.min_replicas,
        max_replicas=deploy.max_replicas,
        usd_per_month=None if month is None else month * deploy.min_replicas,
        most_usd_per_month=None if month is None else month * deploy.max_replicas,
        missing=quote.missing,
        usd_per_wake=None
        if quote.usd_per_hour is None or not deploy.sleeps
        else quote.usd_per_hour * idle_minutes / 60,
    )


def _replica(deploy: DeployConfig, region: str, prices: Prices) -> tuple[str, Quote, int]:
    """A replica's machine, its price, and the minutes that it is kept after a question."""
    if deploy.cloud_run and (instance := instance_quote(deploy, region, prices)):
        return f"Cloud Run ({instance_name(deploy)})", instance, load_cloud_run().idle_minutes
    quote = prices.machine(deploy.machine_type, deploy.accelerator_type, deploy.accelerator_count, region, "standard")
    machine = load_catalog().machines.get(deploy.machine_type)
    gpus = f" with {deploy.accelerator_count} x {deploy.accelerator_type}" if deploy.accelerator_count else ""
    return deploy.machine_type + ("" if machine and machine.accelerators_fixed else gpus), quote, deploy.idle_minutes


def _network_usd(config: RunConfig) -> float | None:
    """Nothing between machines and a bucket of one region; None where traffic crosses regions or clouds, as data of
    another cloud and a mirror may."""
    crosses = any(option.location for option in config.cluster.capacity_fallback) or config.checkpoint.mirror_uri
    near = (not in_bucket(source.address) or source.address.startswith("gs://") for source in config.data.all_sources)
    return 0.0 if config.output.root_uri.startswith("gs://") and not crosses and all(near) else None


def _managed(config: RunConfig, shape: ModelShape) -> ManagedRange | None:
    """Text-only offers for the model's size, of supervised training by adapters or of most weights."""
    if config.train.objective != "sft" or config.train.trainer:
        return None
    method: Method = "lora" if config.model.lora else "full"
    if method == "full" and shape.trainable_parameters < MOSTLY_TRAINED * shape.total_parameters:
        return None
    return text_only_range(shape.total_parameters, method)


def _per(usd: float | None, amount: float | None, unit: float) -> float | None:
    return usd / amount * unit if usd is not None and amount else None
