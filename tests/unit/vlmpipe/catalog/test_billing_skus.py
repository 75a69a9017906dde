"""Prices from the Cloud Billing Catalog's SKUs: sums that give the kept table's prices, and what is not guessed."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlmpipe.catalog import renewal
from vlmpipe.catalog.billing_skus import read_costs
from vlmpipe.catalog.machines import FOLDER
from vlmpipe.catalog.prices import FILE_NAME
from vlmpipe.trainer.errors import ConfigError

REGION, SOURCE = "us-central1", "ce-2026-08-20"
# On-demand rates in us-central1 of the parts of the machines whose sums prices.yaml has from this source.
RATES = {
    "A2 Instance": (0.031611, 0.004237),
    "N1 Predefined Instance": (0.031611, 0.004237),
    "N2 Instance": (0.031611, 0.004237),
    "Compute optimized": (0.03398, 0.004555),
    "G2 Instance": (0.02498844, 0.002927391),
}
GPUS = {"Nvidia Tesla A100 GPU": 2.933908, "Nvidia L4 GPU": 0.560040239}


def sku(description: str, usd: float, unit: str = "h", usage: str = "OnDemand", **changes: Any) -> dict[str, Any]:
    price = {"currencyCode": "USD", "units": str(int(usd)), "nanos": round(usd % 1 * 1e9)}
    expression = {"usageUnit": unit, "displayQuantity": 1, "tieredRates": [{"startUsageAmount": 0, "unitPrice": price}]}
    return {
        "name": "services/6F81-5844-456A/skus/0000", "skuId": "0000", "description": description,
        "category": {"serviceDisplayName": "Compute Engine", "resourceFamily": "Compute", "usageType": usage},
        "serviceRegions": [REGION], "pricingInfo": [{"pricingExpression": expression, "currencyConversionRate": 1}],
        "geoTaxonomy": {"type": "REGIONAL"}, **changes,
    }  # fmt: skip


def skus() -> list[dict[str, Any]]:
    parts = [(f"{name} Core", core, "h") for name, (core, _) in RATES.items()]
    parts += [(f"{name} Ram", memory, "GiBy.h") for name, (_, memory) in RATES.items()]
    parts += [(name, usd, "h") for name, usd in GPUS.items()]
    others = [
        sku("Commitment v1: A2 Cpu in Americas for 1 Year", 0.02, usage="Commit1Yr"),
        sku("A2 Instance Core running in Paris", 0.04, serviceRegions=["europe-west9"]),
    ]
    return [sku(f"{name} running in Americas", usd, unit) for name, usd, unit in parts] + others


def saved(folder: Path, content: object) -> Path:
    path = folder / "skus.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_the_sums_are_the_prices_that_were_compiled_from_the_catalogue(tmp_path: Path) -> None:
    """In two pages, as the service gives them."""
    every = skus()
    costs = read_costs(saved(tmp_path, [{"skus": every[:3], "nextPageToken": "p"}, {"skus": every[3:]}]))
    content = yaml.safe_load((FOLDER / FILE_NAME).read_text(encoding="utf-8"))
    (table,) = (
        one["usd_per_hour"]
        for one in content["machines"]
        if (one["source"], one["region"], one["term"]) == (SOURCE, REGION, "standard")
    )
    found = {name: costs[name]["cost"][REGION]["hour"] for name in table}
    assert found == pytest.approx(table, rel=1e-3) and len(table) > 30
    assert found["a2-highgpu-8g"] == pytest.approx(table["a2-highgpu-8g"], rel=1e-9)
    assert not any("hour_spot" in prices for one in costs.values() for prices in one["cost"].values())


def test_spot_has_names_of_its_own(tmp_path: Path) -> None:
    spot = [
        sku("Spot Preemptible G2 Instance Core running in Americas", 0.01, usage="Preemptible"),
        sku("Spot Preemptible G2 Instance Ram running in Americas", 0.001, "GiBy.h", "Preemptible"),
        sku("Nvidia L4 GPU attached to Spot Preemptible VMs running in Americas", 0.2, usage="Preemptible"),
    ]
    costs = read_costs(saved(tmp_path, {"skus": spot}))
    assert costs["g2-standard-4"]["cost"][REGION] == {"hour_spot": pytest.approx(0.04 + 0.016 + 0.2)}


TWO_TIERS = [{"startUsageAmount": amount, "unitPrice": {"currencyCode": "USD", "units": "1"}} for amount in (0, 9)]
EUROS = [{"unitPrice": {"currencyCode": "EUR", "units": "1", "nanos": 0}}]


@pytest.mark.parametrize(
    "changed",
    [
        sku("G2 Instance Core running in Americas", 0.03),
        sku("G2 Instance Core running in Americas", 0.02498844, "GiBy.h"),
        sku("G2 Instance Core running in Americas", 0, pricingInfo=[]),
        *(
            {**sku("G2 Instance Core running in Americas", 0), "pricingInfo": [{"pricingExpression": rates}]}
            for rates in ({"usageUnit": "h", "tieredRates": TWO_TIERS}, {"usageUnit": "h", "tieredRates": EUROS})
        ),
    ],
)
def test_a_part_that_is_sold_otherwise_or_twice_leaves_its_machines_without_a_price(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    costs = read_costs(saved(tmp_path, {"skus": [*skus(), changed]}))
    assert "g2-standard-4" not in costs and "a2-highgpu-1g" in costs
    assert not any(name.startswith(("a3-", "a2-ultragpu", "g4-")) for name in costs), "families without names"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"skus": [], "nextPageToken": "p"}, "ends with a page that another one follows"),
        ([], "ends with a page"),
        ({"prices": []}, "skus: Field required"),
        ({"skus": [{**sku("A2 Instance Core", 1.0), "pricingInfo": [{"pricingExpression": {}}]}]}, "usageUnit"),
        ({"skus": [{**sku("A2 Instance Core", 1.0), "serviceRegions": "us-central1"}]}, "serviceRegions"),
    ],
)
def test_another_file_and_a_list_that_is_not_whole_are_refused(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_costs(saved(tmp_path, content))


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "skus.json").write_text("skus: []", encoding="utf-8")
    with pytest.raises(ConfigError, match="is no JSON"):
        read_costs(tmp_path / "skus.json")


def test_the_command_takes_the_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    renewal.main([str(saved(tmp_path, {"skus": skus()})), "--source", SOURCE, "--date", "2026-12-01"])
    shown = capsys.readouterr().out
    assert "Nothing is written" in shown and "left: us-central1, spot: no price of" in shown
    assert "left: us-central1, standard" not in shown
    costs = read_costs(saved(tmp_path, {"skus": skus()}))
    text = (FOLDER / FILE_NAME).read_text(encoding="utf-8")
    made = renewal.renewed(text, costs, SOURCE, date(2026, 12, 1), renewal.SKUS)
    assert yaml.safe_load(made.text)["sources"]["ce-2026-12-01"] == {
        "title": renewal.SKUS.title, "url": renewal.SKUS.url, "date": date(2026, 12, 1),
    }  # fmt: skip
