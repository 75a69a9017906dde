"""The places to serve on the screen: the decision first, three rows, and what they leave out."""

from __future__ import annotations

import dataclasses
import io
from typing import cast

import pytest
from rich.console import Console

from vlmpipe.cli.views.cost.serving_places import places_blocks
from vlmpipe.planner.cost.serving_places import CheapestFrom, PlaceMonths, ServingPlaces
from vlmpipe.records.plan_json import ServingPlacesJson

INSTANCE = "8 vCPUs, 32 GiB, NVIDIA_L4"
PLACES = ServingPlaces(
    (100, 10_000, 1_000_000),
    (
        PlaceMonths("Vertex AI", "g2-standard-12", (), (840.0, 840.0, 3360.0), (1, 1, 4)),
        PlaceMonths("Vertex AI, sleeping", "g2-standard-12", (), (827.0, 840.0, 3360.0), (1, 1, 4)),
        PlaceMonths("Cloud Run", INSTANCE, (), (671.0, 1037.0, 4149.0), (1, 1, 4)),
    ),
    ("Cloud Run", "Vertex AI", "Vertex AI"),
    (CheapestFrom(0.0, "Cloud Run"), CheapestFrom(159.4, "Vertex AI")),
    0.27,
    0.36,
)


def printed(places: ServingPlaces, width: int) -> str:
    screen = Console(file=io.StringIO(), width=width, highlight=False)
    for block in places_blocks(cast(ServingPlacesJson, dataclasses.asdict(places))):
        screen.print(block)
    assert isinstance(screen.file, io.StringIO)
    lines = screen.file.getvalue().splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("width", [80, 100])
def test_the_crossing_comes_first_and_each_place_has_its_months(width: int) -> None:
    text = printed(PLACES, width)
    assert text.startswith("Cloud Run costs least up to 159 questions a day, Vertex AI from 159 on.")
    for words in ("$840", "$671", "$3,360 for 4", "$4,149 for 4", "0.27 s of a replica", "$0.36 on Cloud Run"):
        assert words in text
    assert "starts, of unknown length, are not in it" in text


def test_an_only_cheapest_place_and_unknown_prices_are_said() -> None:
    one = dataclasses.replace(PLACES, changes=PLACES.changes[:1], question_s=None)
    text = printed(one, 100)
    assert "Cloud Run costs least at any number of questions a day." in text and "one is counted" in text
    unknown = dataclasses.replace(
        PLACES.places[2], missing=("vcpu of Cloud Run in us-west1",), usd_per_month=(None,) * 3
    )
    none = dataclasses.replace(
        PLACES, places=(*PLACES.places[:2], unknown), changes=(), cheapest=("",) * 3, starts_on_cloud_run_usd=None
    )
    text = printed(none, 100)
    assert "costs least" not in text and "No price is known for: vcpu of Cloud Run in us-west1." in text
    assert text.count("unknown") >= 3
