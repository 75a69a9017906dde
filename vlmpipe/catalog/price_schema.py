"""Schema of a prices file: tables of machines, GPUs, disks, storage and Cloud Run, each with its source and date."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date as date_type
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import ErrorDetails

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.config.sections.cloud_run import load_cloud_run
from vlmpipe.config.validation_errors import Problem, RunFileError, did_you_mean, expected_value, show
from vlmpipe.config.yaml_loader import read_mapping, read_text
from vlmpipe.trainer.config.base import Fraction, Section
from vlmpipe.trainer.errors import ConfigError

Term = Literal["standard", "spot", "flex_start"]
OLD_AFTER_DAYS = 90
VCPU, GIB, IN_ZONES = "vcpu", "gib", "_in_zones"  # names in cloud_run; of a GPU with capacity in further zones
# Spot prices may change every day, flex-start's are announced for weeks: cloud.google.com/spot-vms/pricing.
FLOATING_OLD_AFTER_DAYS = 30


@dataclass(frozen=True)
class Price:
    """One price of a table, in US dollars, and where it is from."""

    usd: float
    date: str  # ISO 8601
    source: str
    fee_included: bool = False  # Vertex AI's management fee is in it
    old_after_days: int = OLD_AFTER_DAYS

    def is_old(self, today: date_type) -> bool:
        return (today - date_type.fromisoformat(self.date)).days > self.old_after_days


@dataclass(frozen=True)
class RequestPrices:
    """Prices of 1,000 requests to a store."""

    class_a: Price  # writes, copies and lists
    class_b: Price  # other reads


def _day(value: object) -> object:
    if not isinstance(value, str | date_type):  # pydantic takes a number as seconds since 1970
        raise ValueError("expected a date such as 2026-11-20")
    return value


_Day = Annotated[date_type, BeforeValidator(_day)]
_Usd = Annotated[float, Field(ge=0, strict=True)]


class _Source(Section):
    title: str
    url: str = ""
    date: _Day


class _Sourced(Section):
    """A table with its source: a key of `sources`, or any text with a date of its own."""

    source: str = Field(min_length=1)
    date: _Day | None = None
    fee_included: bool = False


class _Fee(_Sourced):
    share: Fraction


class _Hourly(_Sourced):
    region: str = Field(min_length=1)
    term: Term
    usd_per_hour: dict[str, _Usd]


class _Disks(_Sourced):
    region: str = Field(min_length=1)
    usd_per_gb_month: dict[str, _Usd]


class _Stores(_Sourced):
    usd_per_gb_month: dict[str, _Usd]


class _PerSecond(_Sourced):
    """Cloud Run: of an instance's vCPU, of its GiB, and of its GPU."""

    region: str = Field(min_length=1)
    usd_per_s: dict[str, _Usd]


class _RequestPrices(Section):
    class_a: _Usd
    class_b: _Usd


class _Requests(_Sourced):
    store: Literal["gs", "s3"]
    usd_per_1000: _RequestPrices


class PriceFile(Section):
    """The tables of a prices file. `prices.yaml` shows the form."""

    sources: dict[str, _Source] = Field(default_factory=dict)
    vertex_fee: _Fee | None = None
    machines: tuple[_Hourly, ...] = ()
    accelerators: tuple[_Hourly, ...] = ()
    boot_disks: tuple[_Disks, ...] = ()
    storage: tuple[_Stores, ...] = ()
    requests: tuple[_Requests, ...] = ()
    cloud_run: tuple[_PerSecond, ...] = ()

    def price(self, table: _Sourced, usd: float) -> Price:
        """A price of this table, with the table's date and source."""
        source = self.sources.get(table.source)
        read = table.date or (source.date if source else None)
        assert read is not None, table.source  # `_undated` has refused it
        floats = isinstance(table, _Hourly) and table.term != "standard"
        days = FLOATING_OLD_AFTER_DAYS if floats else OLD_AFTER_DAYS
        return Price(usd, read.isoformat(), source.title if source else table.source, table.fee_included, days)

    def hourly(self) -> Iterator[tuple[tuple[str, str, str], Price]]:
        for table in (*self.machines, *self.accelerators):
            for name, usd in table.usd_per_hour.items():
                yield (table.region, table.term, name), self.price(table, usd)

    def monthly_disks(self) -> Iterator[tuple[tuple[str, str], Price]]:
        for table in self.boot_disks:
            for name, usd in table.usd_per_gb_month.items():
                yield (table.region, name), self.price(table, usd)

    def monthly_stores(self) -> Iterator[tuple[str, Price]]:
        for table in self.storage:
            for region, usd in table.usd_per_gb_month.items():
                yield region, self.price(table, usd)

    def by_second(self) -> Iterator[tuple[tuple[str, str], Price]]:
        for table in self.cloud_run:
            for name, usd in table.usd_per_s.items():
                yield (table.region, name), self.price(table, usd)

    def by_store(self) -> Iterator[tuple[str, RequestPrices]]:
        for table in self.requests:
            of_class = table.usd_per_1000
            yield table.store, RequestPrices(self.price(table, of_class.class_a), self.price(table, of_class.class_b))


def read_prices(path: Path) -> PriceFile:
    """A prices file of the user's own. Raises ConfigError that names the file and every wrong entry."""
    if not path.is_file():
        raise ConfigError(
            f"no prices file {path}",
            expected="plan.prices_file: the path of a YAML file, or empty for the built-in prices",
        )
    tables = f"tables of prices: {', '.join(PriceFile.model_fields)}"
    return parse_prices(read_mapping(path, read_text(path, "a prices file"), tables), str(path))


def parse_prices(data: Mapping[str, object], origin: str) -> PriceFile:
    """The tables of a file. Raises RunFileError, a ConfigError, with all problems at once."""
    try:
        tables = PriceFile.model_validate(data)
    except ValidationError as error:
        raise RunFileError(origin, [_problem(details) for details in error.errors(include_url=False)]) from error
    if problems := [*_unknown_names(tables), *_undated(tables)]:
        raise RunFileError(origin, problems)
    return tables


def _problem(details: ErrorDetails) -> Problem:
    entry = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"]).lstrip(".")
    kind = details["type"]
    if kind == "extra_forbidden":
        tables = (PriceFile, _Source, _Fee, _Hourly, _Disks, _Stores, _Requests, _RequestPrices, _PerSecond)
        hint = did_you_mean(str(details["loc"][-1]), sorted({name for table in tables for name in table.model_fields}))
        return Problem(entry, f"found an unknown key, expected one of a prices file{hint}")
    if kind == "missing":
        return Problem(entry, "found nothing, expected a value")
    if kind in ("float_type", "finite_number"):
        expected = "a number of at least 0"
    else:
        expected = "a date such as 2026-11-20" if "date" in kind or kind == "value_error" else expected_value(details)
    return Problem(entry, f"found {show(details['input'])}, expected {expected}")


def _unknown_names(tables: PriceFile) -> Iterator[Problem]:
    """A misspelled name would be a price that replaces nothing."""
    catalog = load_catalog()
    attached = {
        gpu for machine in catalog.machines.values() if not machine.accelerators_fixed for gpu in machine.accelerators
    }
    for kind, known in (("machines", catalog.machines), ("accelerators", attached)):
        for index, table in enumerate(getattr(tables, kind)):
            for name in table.usd_per_hour:
                if name not in known:
                    expected = "a machine type" if kind == "machines" else f"one of {', '.join(sorted(attached))}"
                    text = f"found {name}, expected {expected} of Vertex AI training{did_you_mean(name, list(known))}"
                    yield Problem(f"{kind}[{index}].usd_per_hour", text)

    of_instance = [VCPU, GIB, *(gpu + end for gpu in load_cloud_run().gpus for end in ("", IN_ZONES))]
    for index, table in enumerate(tables.cloud_run):
        for name in table.usd_per_s:
            if name not in of_instance:
                text = f"found {name}, expected one of {', '.join(of_instance)}{did_you_mean(name, of_instance)}"
                yield Problem(f"cloud_run[{index}].usd_per_s", text)


def _undated(tables: PriceFile) -> Iterator[Problem]:
    entries: list[tuple[str, _Sourced]] = [("vertex_fee", tables.vertex_fee)] if tables.vertex_fee else []
    for kind in ("machines", "accelerators", "boot_disks", "storage", "requests", "cloud_run"):
        entries += [(f"{kind}[{index}]", table) for index, table in enumerate(getattr(tables, kind))]
    for entry, table in entries:
        if table.date is None and table.source not in tables.sources:
            text = f"found no date, expected the day on which {table.source!r} was read, or a key of sources"
            yield Problem(f"{entry}.date", text)
