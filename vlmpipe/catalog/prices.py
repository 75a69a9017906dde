"""Prices per hour and per month, from `catalog/prices.yaml` and a file of the user's own.

Vertex AI charges Compute Engine's price and a management fee. The fee is a share of the standard price, also on Spot
and flex-start; `prices.yaml` names the bill that shows it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime

from vlmpipe.catalog.machines import load_catalog, read_yaml
from vlmpipe.catalog.price_schema import (
    GIB,
    IN_ZONES,
    VCPU,
    Price,
    PriceFile,
    RequestPrices,
    Term,
    parse_prices,
    read_prices,
)
from vlmpipe.trainer.storage.user_folders import expanded

FILE_NAME = "prices.yaml"
FEE = "Vertex AI's fee"


@dataclass(frozen=True)
class Quote:
    """A price of one replica; None if a part of it has no price."""

    usd_per_hour: float | None
    date: str | None  # of its oldest part
    missing: tuple[str, ...]  # parts without a price, and what known prices leave out
    old: tuple[str, ...]  # its parts that were read long ago (`Price.is_old`), with their day
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class MonthlyQuote:
    """A price of storage, as Quote. Google bills by GiB where its price lists say GB."""

    usd_per_gb_month: float | None
    date: str | None
    missing: tuple[str, ...]
    old: tuple[str, ...]
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prices:
    """All prices that are known, and the day from which their age is counted."""

    today: date
    hourly: Mapping[tuple[str, str, str], Price] = field(repr=False)  # by region, term and machine or GPU
    disks: Mapping[tuple[str, str], Price] = field(repr=False)  # by region and boot disk type
    stores: Mapping[str, Price] = field(repr=False)  # Cloud Storage, class Standard, by region
    per_1000: Mapping[str, RequestPrices] = field(repr=False)  # requests, by the scheme of the store
    fee: Price  # Vertex AI's management fee; `usd` is its share of the standard price
    by_second: Mapping[tuple[str, str], Price] = field(repr=False)  # Cloud Run, by region and part of an instance

    def machine(
        self, machine_type: str, accelerator_type: str, accelerator_count: int, region: str, term: Term
    ) -> Quote:
        """One replica's price with its GPUs and Vertex AI's fee, per hour, without its boot disk."""
        machine = load_catalog().machines.get(machine_type)
        counts = {machine_type: 1}
        if accelerator_count and not (machine and machine.accelerators_fixed):
            counts[accelerator_type] = accelerator_count
        prices = {name: self.hourly[region, term, name] for name in counts if (region, term, name) in self.hourly}
        missing = [f"{name} in {region}, {term}" for name in counts if name not in prices]
        parts = {f"{name} in {region}, {term}": price for name, price in prices.items()}
        usd = sum(counts[name] * price.usd for name, price in prices.items())
        for name, price in prices.items():
            standard = self.hourly.get((region, "standard", name))
            if price.fee_included or not self.fee.usd:
                continue
            if standard is None:
                missing.append(
                    f"Vertex AI's fee on {name} in {region}: a share of its standard price, which is unknown"
                )
                continue
            parts |= {f"{name} in {region}, standard": standard, FEE: self.fee}
            usd += counts[name] * self._fee_usd(standard)
        return Quote(usd if len(prices) == len(counts) else None, *self._origin(parts, missing))

    def boot_disk(self, boot_disk_type: str, region: str) -> MonthlyQuote:
        """A boot disk's price with Vertex AI's fee."""
        price, name = self.disks.get((region, boot_disk_type)), f"boot disk {boot_disk_type} in {region}"
        if price is None:
            return MonthlyQuote(None, *self._origin({}, [name]))
        if price.fee_included:
            return MonthlyQuote(price.usd, *self._origin({name: price}, []))
        return MonthlyQuote(price.usd + self._fee_usd(price), *self._origin({name: price, FEE: self.fee}, []))

    def storage(self, region: str) -> MonthlyQuote:
        """Cloud Storage's price, class Standard, in a single region. Vertex AI adds nothing to it."""
        price, name = self.stores.get(region), f"Cloud Storage in {region}"
        if price is None:
            return MonthlyQuote(None, *self._origin({}, [name]))
        return MonthlyQuote(price.usd, *self._origin({name: price}, []))

    def instance(self, cpu: int, memory_gib: int, accelerator_type: str, region: str, *, in_zones: bool) -> Quote:
        """An instance of Cloud Run with one GPU, per hour of its life. in_zones: with capacity in further zones."""
        counts = {VCPU: cpu, GIB: memory_gib, accelerator_type + IN_ZONES * in_zones: 1}
        prices = {name: self.by_second[region, name] for name in counts if (region, name) in self.by_second}
        missing = [f"{name} of Cloud Run in {region}" for name in counts if name not in prices]
        parts = {f"{name} of Cloud Run in {region}": price for name, price in prices.items()}
        usd_per_s = sum(counts[name] * price.usd for name, price in prices.items())
        return Quote(None if missing else 3600 * usd_per_s, *self._origin(parts, missing))

    def requests(self, uri: str) -> RequestPrices | None:
        """Prices of requests to a bucket, class Standard in a single region; None where none is known."""
        return self.per_1000.get(uri.partition(":")[0])

    def _fee_usd(self, standard: Price) -> float:
        without_fee = standard.usd / (1 + self.fee.usd) if standard.fee_included else standard.usd
        return self.fee.usd * without_fee

    def _origin(
        self, parts: Mapping[str, Price], missing: list[str]
    ) -> tuple[str | None, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Date, missing, old and sources of a quote that is made of these parts."""
        oldest = min((part.date for part in parts.values()), default=None)
        sources = tuple(dict.fromkeys(part.source for part in parts.values()))
        old = tuple(f"{name} ({part.date})" for name, part in parts.items() if part.is_old(self.today))
        return oldest, tuple(missing), old, sources


def load_prices(user_file: str = "", today: date | None = None) -> Prices:
    """The built-in prices, with those of `user_file` in their place.

    Raises ConfigError that names every wrong entry of the user's file.
    """
    files = [_built_in(), *([read_prices(expanded(user_file))] if user_file else [])]
    fees = [file.price(fee, fee.share) for file in files if (fee := file.vertex_fee)]
    return Prices(
        today or datetime.now(UTC).date(),
        {key: price for file in files for key, price in file.hourly()},
        {key: price for file in files for key, price in file.monthly_disks()},
        {key: price for file in files for key, price in file.monthly_stores()},
        {key: price for file in files for key, price in file.by_store()},
        fees[-1],
        {key: price for file in files for key, price in file.by_second()},
    )


@functools.cache
def _built_in() -> PriceFile:
    return parse_prices(read_yaml(FILE_NAME), FILE_NAME)
