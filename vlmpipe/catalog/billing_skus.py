"""Prices of machines from the Cloud Billing Catalog API's own list of SKUs, saved to a file.

The form is that of `cloudbilling.services.skus.list` (v1): pages with `skus`, each with a description, a usage type,
regions and a price for a unit. A machine's price is the sum of its vCPUs, memory and GPUs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from vlmpipe.catalog.machines import Machine, load_catalog
from vlmpipe.config.yaml_loader import packaged_yaml
from vlmpipe.trainer.errors import ConfigError, os_errors
from vlmpipe.trainer.storage.regular_files import read_regular

FILE = Path(__file__).with_suffix(".yaml")
MAX_BYTES = 2**29
NANOS = 1e-9
Usage = Literal["OnDemand", "Preemptible"]
FIELDS: dict[Usage, str] = {"OnDemand": "hour", "Preemptible": "hour_spot"}
HOUR, GIB_HOUR = "h", "GiBy.h"


class _Message(BaseModel):
    """A message of the API, of which other fields are left alone."""

    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", frozen=True, strict=True)


class _Money(_Message):
    currency_code: str
    units: str = "0"
    nanos: int = 0

    @property
    def usd(self) -> float | None:
        return int(self.units) + self.nanos * NANOS if self.currency_code == "USD" else None


class _Tier(_Message):
    start_usage_amount: float = 0.0
    unit_price: _Money


class _Expression(_Message):
    usage_unit: str
    tiered_rates: list[_Tier] = Field(default_factory=list)


class _Pricing(_Message):
    pricing_expression: _Expression


class _Category(_Message):
    usage_type: str = ""


class _Sku(_Message):
    sku_id: str
    description: str
    category: _Category
    service_regions: list[str] = Field(default_factory=list)
    pricing_info: list[_Pricing] = Field(default_factory=list)

    def usd(self, unit: str) -> float | None:
        """Price of a unit; None where it has another unit, another currency, or several tiers."""
        if len(self.pricing_info) != 1 or len(self.pricing_info[0].pricing_expression.tiered_rates) != 1:
            return None
        expression = self.pricing_info[0].pricing_expression
        return expression.tiered_rates[0].unit_price.usd if expression.usage_unit == unit else None


class _Page(_Message):
    skus: list[_Sku]
    next_page_token: str = ""


@dataclass(frozen=True)
class SkuNames:
    """How descriptions begin, by family and by accelerator. `date` is ISO 8601."""

    date: str
    source: str
    service: str
    families: Mapping[str, str]
    gpus: Mapping[str, str]


@functools.cache
def load_names() -> SkuNames:
    content = packaged_yaml(FILE.read_text(encoding="utf-8"))
    return TypeAdapter(SkuNames).validate_python(content | {"date": str(content["date"])})


def read_costs(path: Path) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Prices of a saved list, by machine, `cost`, region, and `hour` or `hour_spot`.

    The file is a page, or a list of all pages. Raises ConfigError for another file, or a list that is not whole.
    """
    try:
        with os_errors(f"reading {path}"):
            content = json.loads(read_regular(path, MAX_BYTES))
        pages = TypeAdapter(list[_Page]).validate_python(content if isinstance(content, list) else [content])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{path} is no list of SKUs: {where}: {first['msg']}", expected="pages of cloudbilling.services.skus.list"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}", expected="pages of cloudbilling.services.skus.list") from error
    if not pages or pages[-1].next_page_token:
        raise ConfigError(
            f"{path} ends with a page that another one follows",
            expected="all pages in one list, the last one without nextPageToken",
            fix="fetch the rest with pageToken, and put the pages into one JSON list",
        )
    return _costs(_Parts.of(sku for page in pages for sku in page.skus))


@dataclass(frozen=True)
class _Parts:
    """Prices of parts by their description's beginning, usage and region; None where two SKUs have other prices."""

    usd: Mapping[tuple[str, Usage, str], float | None]

    @classmethod
    def of(cls, skus: Iterator[_Sku]) -> _Parts:
        names, usd = load_names(), dict[tuple[str, Usage, str], float | None]()
        units = {f"{family} {part}": unit for family in names.families.values() for part, unit in _UNITS.items()}
        units |= dict.fromkeys(names.gpus.values(), HOUR)
        for sku in skus:
            for usage in FIELDS:
                name = _part_of(sku.description, usage)
                if sku.category.usage_type != usage or name not in units:
                    continue
                price = sku.usd(units[name])
                for region in sku.service_regions:
                    key = (name, usage, region)
                    usd[key] = price if usd.get(key, price) == price else None
        return cls(usd)


_UNITS = {"Core": HOUR, "Ram": GIB_HOUR}


def _part_of(description: str, usage: Usage) -> str:
    """The part that a description such as "Spot Preemptible A2 Instance Core running in Americas" names."""
    part = description.partition(" running in ")[0]
    if usage == "OnDemand":
        return part
    return part.removeprefix("Spot Preemptible ").removesuffix(" attached to Spot Preemptible VMs")


def _costs(parts: _Parts) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    costs: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    regions = dict.fromkeys(region for _, _, region in parts.usd)
    for machine in load_catalog().machines.values():
        for region in regions:
            for usage, field in FIELDS.items():
                usd = _machine_usd(machine, usage, region, parts)
                if usd is not None:
                    costs.setdefault(machine.machine_type, {"cost": {}})["cost"].setdefault(region, {})[field] = usd
    return costs


def _machine_usd(machine: Machine, usage: Usage, region: str, parts: _Parts) -> float | None:
    """The sum of the machine's parts; None where one has no price or no known name."""
    names = load_names()
    family = names.families.get(machine.machine_type.partition("-")[0])
    if family is None or machine.local_ssd_gib:
        return None
    amounts = {f"{family} Core": float(machine.vcpus), f"{family} Ram": machine.memory_gib}
    if machine.accelerators_fixed:
        amounts[names.gpus.get(machine.accelerator_type, "")] = float(machine.accelerator_counts[0])
    prices = {name: parts.usd.get((name, usage, region)) for name in amounts}
    known = {name: usd for name, usd in prices.items() if usd is not None}
    if len(known) < len(amounts):
        return None
    return round(sum(amounts[name] * usd for name, usd in known.items()), 9)
