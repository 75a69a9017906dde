"""A month of serving at each place, by the questions that come in a day, and the place that costs least.

A place that sleeps is billed while an instance lives: with questions at random moments of the day, of which each keeps
it for its idle time, that is the share 1 - exp(-questions * idle time) of all hours. Starts are not in it. Where one
replica cannot answer all questions, as many as can are billed all the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.config.sections.cloud_run import CloudRunConfig, load_cloud_run
from vlmpipe.config.sections.deploy import DeployConfig
from vlmpipe.planner.jobs.question_time import question_seconds
from vlmpipe.planner.steps.estimate import HOURS_PER_MONTH

if TYPE_CHECKING:
    from vlmpipe.catalog.prices import Prices, Quote
    from vlmpipe.planner.scenario import Scenario

QUESTIONS_A_DAY = (100, 10_000, 1_000_000)
HOURS_A_DAY = 24
NOTABLY = 0.99  # a place that sleeps costs less than one that does not if it costs at most this share
MIN_A_DAY, MAX_A_DAY, STEPS_A_DECADE = (
    1.0,
    1e7,
    20,
)  # questions a day among which a change of the cheapest place is looked for


@dataclass(frozen=True)
class ServingPlace:
    """A way to serve. None: not known."""

    name: str
    machine: str  # of a replica
    usd_per_hour: float | None
    idle_minutes: int | None  # that a replica is kept, and billed, after a question; None: it never sleeps
    question_s: float | None
    missing: tuple[str, ...]

    def replicas(self, questions_a_day: float) -> int:
        """Replicas that answer this number of questions; 1 where a question's time is not known."""
        return max(1, math.ceil(questions_a_day * (self.question_s or 0.0) / (HOURS_A_DAY * 3600)))

    def usd_per_month(self, questions_a_day: float) -> float | None:
        """Replicas for the hours in which they live."""
        if self.usd_per_hour is None:
            return None
        replicas, share = self.replicas(questions_a_day), 1.0
        if self.idle_minutes is not None and replicas == 1:
            share = -math.expm1(-questions_a_day / HOURS_A_DAY * self.idle_minutes / 60)
        return self.usd_per_hour * HOURS_PER_MONTH * replicas * share


@dataclass(frozen=True)
class PlaceMonths:
    """A place with its months of QUESTIONS_A_DAY."""

    name: str
    machine: str
    missing: tuple[str, ...]
    usd_per_month: tuple[float | None, ...]
    replicas: tuple[int, ...]


@dataclass(frozen=True)
class CheapestFrom:
    """The place that costs least from this number of questions a day on."""

    questions_a_day: float
    name: str


@dataclass(frozen=True)
class ServingPlaces:
    """The places side by side. cheapest: of each of QUESTIONS_A_DAY; empty where no price is known."""

    questions_a_day: tuple[int, ...]
    places: tuple[PlaceMonths, ...]
    cheapest: tuple[str, ...]
    changes: tuple[CheapestFrom, ...]  # from the fewest questions on
    question_s: float | None  # of a replica's time
    starts_on_cloud_run_usd: float | None  # of one that its idle time follows


def serving_places(case: Scenario, prices: Prices) -> ServingPlaces | None:
    """The places for the run's model, its GPU and its questions; None without deploy."""
    deploy = case.config.deploy
    if deploy is None:
        return None
    gpu = load_catalog().gpus.get(deploy.accelerator_type) if deploy.accelerator_count else None
    question_s = question_seconds(case, gpu, deploy.accelerator_count) if gpu else None
    places = tuple(_places(deploy, case.config.gcp.location, question_s, prices))
    on_cloud_run = places[-1]
    return ServingPlaces(
        questions_a_day=QUESTIONS_A_DAY,
        places=tuple(
            PlaceMonths(
                place.name,
                place.machine,
                place.missing,
                tuple(map(place.usd_per_month, QUESTIONS_A_DAY)),
                tuple(map(place.replicas, QUESTIONS_A_DAY)),
            )
            for place in places
        ),
        cheapest=tuple(_cheapest(places, questions) for questions in QUESTIONS_A_DAY),
        changes=tuple(_changes(places)),
        question_s=question_s,
        starts_on_cloud_run_usd=None
        if on_cloud_run.usd_per_hour is None
        else on_cloud_run.usd_per_hour * load_cloud_run().idle_minutes / 60,
    )


def _places(deploy: DeployConfig, region: str, question_s: float | None, prices: Prices) -> Iterator[ServingPlace]:
    """An endpoint of Vertex AI that never sleeps, one that does, and Cloud Run."""
    machine, gpus = vertex_machine(deploy), deploy.accelerator_count
    quote = prices.machine(machine, deploy.accelerator_type, gpus, region, "standard")
    for name, idle in (("Vertex AI", None), ("Vertex AI, sleeping", deploy.idle_minutes)):
        yield ServingPlace(name, machine, quote.usd_per_hour, idle, question_s, quote.missing)
    instance = instance_quote(deploy, region, prices)
    usd, missing = (instance.usd_per_hour, instance.missing) if instance else (None, (_not_there(deploy),))
    idle = load_cloud_run().idle_minutes
    yield ServingPlace("Cloud Run", instance_name(deploy), usd, idle, question_s, missing)


def instance_quote(deploy: DeployConfig, region: str, prices: Prices) -> Quote | None:
    """The price of an instance of Cloud Run; None where it has no such GPU, or not this number of them."""
    gpu = load_cloud_run().gpus.get(deploy.accelerator_type)
    if gpu is None or deploy.accelerator_count != 1:
        return None
    chosen = deploy.cloud_run or CloudRunConfig()
    cpu, memory_gib = chosen.size(gpu)
    return prices.instance(cpu, memory_gib, deploy.accelerator_type, region, in_zones=chosen.zonal_redundancy)


def instance_name(deploy: DeployConfig) -> str:
    """The size of an instance, for people; a dash where Cloud Run has none."""
    gpu = load_cloud_run().gpus.get(deploy.accelerator_type)
    if gpu is None or deploy.accelerator_count != 1:
        return "–"
    cpu, memory_gib = (deploy.cloud_run or CloudRunConfig()).size(gpu)
    return f"{cpu} vCPUs, {memory_gib} GiB, {deploy.accelerator_type}"


def vertex_machine(deploy: DeployConfig) -> str:
    """deploy.machine_type, or of a run on Cloud Run, where it says nothing, the smallest machine with the GPU."""
    catalog = load_catalog()
    able = catalog.machines_with(deploy.accelerator_type)
    if not deploy.cloud_run or deploy.machine_type in {machine.machine_type for machine in able}:
        return deploy.machine_type
    return min(able, key=lambda machine: machine.vcpus).machine_type if able else deploy.machine_type


def _not_there(deploy: DeployConfig) -> str:
    gpus = f"{deploy.accelerator_count} x {deploy.accelerator_type}" if deploy.accelerator_count else "no GPU"
    return f"{gpus} on Cloud Run"


def _cheapest(places: tuple[ServingPlace, ...], questions_a_day: float) -> str:
    """The name of the place that costs least; one that sleeps if it costs notably less than those that do not."""
    months = [(place.usd_per_month(questions_a_day), place) for place in places]
    known = [(usd, place) for usd, place in months if usd is not None]
    awake = [usd for usd, place in known if place.idle_minutes is None]
    likely = [
        (usd, place) for usd, place in known if place.idle_minutes is None or not awake or usd <= NOTABLY * min(awake)
    ]
    return min(likely, key=lambda pair: pair[0])[1].name if likely else ""


def _changes(places: tuple[ServingPlace, ...]) -> Iterator[CheapestFrom]:
    """Where another place becomes the cheapest one."""
    name, before = _cheapest(places, MIN_A_DAY), MIN_A_DAY
    if not name:
        return
    yield CheapestFrom(0.0, name)
    steps = round(math.log10(MAX_A_DAY / MIN_A_DAY) * STEPS_A_DECADE)
    for step in range(1, steps + 1):
        after = MIN_A_DAY * 10 ** (step / STEPS_A_DECADE)
        if (following := _cheapest(places, after)) != name:
            low, high = before, after
            while high / low > 1.005:
                middle = math.sqrt(low * high)
                low, high = (middle, high) if _cheapest(places, middle) == name else (low, middle)
            yield CheapestFrom(high, following)
            name = following
        before = after
