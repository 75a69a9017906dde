"""Places to serve: months that can be done by hand, and the number of questions at which another place costs less."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.support.planner.configs import A100_80, LLAVA_7B, RoundPrices, machine, run_config
from vlmpipe.catalog.prices import load_prices
from vlmpipe.config.sections.deploy import DeployConfig
from vlmpipe.planner.cost import serving_places as module
from vlmpipe.planner.cost.serving_places import QUESTIONS_A_DAY, ServingPlace, serving_places, vertex_machine
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.workload import Workload

IMAGE = f"us-docker.pkg.dev/my-project/serving/vllm@sha256:{'1' * 64}"
ALWAYS = ServingPlace("Vertex AI", "g2", 1.15, None, 0.5, ())
SLEEPING = replace(ALWAYS, name="Vertex AI, sleeping", idle_minutes=60)
CLOUD_RUN = ServingPlace("Cloud Run", "8 vCPUs", 1.42, 15, 0.5, ())
PLACES = (ALWAYS, SLEEPING, CLOUD_RUN)


def case(**deploy: object) -> Scenario:
    section = {"endpoint": "digits", "image_uri": IMAGE, **deploy}
    config = run_config().model_copy(update={"deploy": DeployConfig.model_validate(section)})
    load = Workload.assumed(config, LLAVA_7B)
    return Scenario(config, LLAVA_7B, layout_of(config), load, machine(), A100_80)


def test_a_place_that_never_sleeps_costs_all_hours_and_a_replica_more_for_questions_above_its_time() -> None:
    assert ALWAYS.usd_per_month(0) == ALWAYS.usd_per_month(172_800) == pytest.approx(1.15 * 730)
    assert ALWAYS.replicas(172_800) == 1 and ALWAYS.replicas(172_801) == 2
    assert ALWAYS.usd_per_month(1_000_000) == pytest.approx(6 * 1.15 * 730)


def test_a_place_that_sleeps_costs_nothing_without_questions_and_all_hours_with_many() -> None:
    assert CLOUD_RUN.usd_per_month(0) == 0.0
    few = CLOUD_RUN.usd_per_month(0.01)
    assert few == pytest.approx(1.42 * 730 * 0.01 / 24 * 0.25, rel=1e-3), "each question alone keeps it 15 minutes"
    assert CLOUD_RUN.usd_per_month(100) == pytest.approx(1.42 * 730 * (1 - math.exp(-100 / 96)))
    assert CLOUD_RUN.usd_per_month(100_000) == pytest.approx(1.42 * 730)


def test_the_cheapest_place_changes_where_its_hours_cost_as_much_as_all_of_the_other() -> None:
    first, second = module._changes(PLACES)
    assert (first.name, second.name) == ("Cloud Run", "Vertex AI")
    by_hand = -math.log(1 - 0.99 * 1.15 / 1.42) * 96  # questions a day, at 1 % less than all hours of the other
    assert second.questions_a_day == pytest.approx(by_hand, rel=0.006)
    assert module._cheapest(PLACES, 100) == "Cloud Run" and module._cheapest(PLACES, 1_000_000) == "Vertex AI"


def test_a_cheaper_instance_costs_least_at_any_number_and_without_prices_nothing_does() -> None:
    (only,) = module._changes((ALWAYS, SLEEPING, replace(CLOUD_RUN, usd_per_hour=1.0)))
    assert only.name == "Cloud Run"
    unknown = tuple(replace(place, usd_per_hour=None) for place in PLACES)
    assert list(module._changes(unknown)) == [] and module._cheapest(unknown, 100) == ""
    assert [change.name for change in module._changes((ALWAYS, SLEEPING))] == ["Vertex AI, sleeping", "Vertex AI"]


def test_the_places_of_a_run_have_its_gpu_in_its_region() -> None:
    prices = load_prices()
    found = serving_places(case(), prices)
    assert found and [place.name for place in found.places] == ["Vertex AI", "Vertex AI, sleeping", "Cloud Run"]
    quote = prices.instance(8, 32, "NVIDIA_L4", "us-central1", in_zones=False)
    assert quote.usd_per_hour == pytest.approx(3600 * (0.0001867 + 8 * 0.000018 + 32 * 0.000002))
    assert found.starts_on_cloud_run_usd == pytest.approx(quote.usd_per_hour / 4)
    assert found.question_s and found.question_s > 0
    assert len(found.cheapest) == len(found.places[0].usd_per_month) == len(QUESTIONS_A_DAY)
    small = serving_places(case(cloud_run={"cpu": 4}), prices)
    assert small and small.starts_on_cloud_run_usd and small.starts_on_cloud_run_usd < found.starts_on_cloud_run_usd
    assert serving_places(replace(case(), config=run_config()), prices) is None


def test_gpus_that_cloud_run_does_not_have_are_named_and_not_priced() -> None:
    found = serving_places(case(accelerator_type="NVIDIA_H100_80GB", machine_type="a3-highgpu-1g"), RoundPrices())  # type: ignore[arg-type]
    assert found and found.places[-1].missing == ("1 x NVIDIA_H100_80GB on Cloud Run",)
    assert found.places[-1].usd_per_month == (None, None, None) and found.starts_on_cloud_run_usd is None
    assert set(found.cheapest) <= {"Vertex AI", "Vertex AI, sleeping"}


def test_a_run_on_cloud_run_is_compared_with_a_machine_that_has_its_gpu() -> None:
    def compared(**deploy: object) -> str:
        return vertex_machine(DeployConfig.model_validate({"endpoint": "d", **deploy}))

    assert compared(cloud_run={}) == "g2-standard-12"
    assert compared(cloud_run={}, accelerator_type="NVIDIA_RTX_PRO_6000") == "g4-standard-48"
    assert compared(machine_type="n1-standard-8") == "n1-standard-8"
