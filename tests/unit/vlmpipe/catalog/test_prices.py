"""Prices: what is known, what is old, what is missing, and a file of the user's own."""

from __future__ import annotations

import re
from datetime import date, timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import get_args

import pytest

from tests.support.paths import ROOT
from tests.support.prices_page import PAGE, prices_page
from vlmpipe.catalog.machines import load_catalog, read_yaml
from vlmpipe.catalog.price_schema import FLOATING_OLD_AFTER_DAYS, OLD_AFTER_DAYS, PriceFile, Term
from vlmpipe.catalog.prices import FILE_NAME, Prices, load_prices
from vlmpipe.trainer.errors import ConfigError, ExitCode

TODAY = date(2026, 11, 28)
H100 = ("a3-highgpu-8g", "NVIDIA_H100_80GB", 8, "us-central1")


@pytest.fixture(scope="module")
def prices() -> Prices:
    return load_prices(today=TODAY)


def _own(folder: Path, text: str) -> Prices:
    path = folder / "own.yaml"
    path.write_text(text, encoding="utf-8")
    return load_prices(str(path), today=TODAY)


def test_every_price_is_of_a_machine_or_gpu_that_exists_in_its_region() -> None:
    catalog = load_catalog()
    tables = PriceFile.model_validate(read_yaml(FILE_NAME))
    assert tables.machines
    for table in tables.machines:
        for name in table.usd_per_hour:
            machine = catalog.machines[name]
            assert machine.spot or table.term != "spot"
            if machine.accelerators_fixed:
                assert table.region in catalog.regions[machine.accelerator_type], (name, table.region)
    for table in tables.accelerators:
        for name in table.usd_per_hour:
            assert table.region in catalog.regions[name]


def test_the_page_is_generated_from_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == prices_page(), "run python -m tests.support.generated_files"


def test_no_price_is_given_twice() -> None:
    tables = PriceFile.model_validate(read_yaml(FILE_NAME))
    for entries in (tables.hourly(), tables.monthly_disks(), tables.monthly_stores()):
        keys = [key for key, _ in entries]
        assert len(keys) == len(set(keys))


def test_no_price_is_from_the_future(prices: Prices) -> None:
    known = [*prices.hourly.values(), *prices.disks.values(), *prices.stores.values(), prices.fee]
    assert all(date.fromisoformat(price.date) <= TODAY and price.source for price in known)


def test_spot_and_flex_start_cost_less_than_on_demand(prices: Prices) -> None:
    for (region, term, name), price in prices.hourly.items():
        standard = prices.hourly.get((region, "standard", name))
        if term != "standard" and standard is not None:
            assert price.usd < standard.usd, (region, term, name)


@pytest.mark.parametrize(
    ("term", "usd_per_hour"),
    [("standard", 101.5429684 - 0.53561644), ("flex_start", 52.0306163 - 0.53561644)],
)
def test_the_published_bill_of_a_job_on_eight_h100_is_reproduced(
    prices: Prices, term: Term, usd_per_hour: float
) -> None:
    """Bills by SKU of August 2025, less the boot disk; see vertex-fee in prices.yaml."""
    quote = prices.machine(*H100, term)
    assert quote.usd_per_hour == pytest.approx(usd_per_hour, rel=1e-5)
    assert quote.missing == ()


def test_the_boot_disk_of_the_same_bill_is_reproduced(prices: Prices) -> None:
    assert prices.boot_disk("pd-ssd", "us-central1").usd_per_gb_month == pytest.approx(0.0002678 * 730, rel=1e-4)


def test_the_published_vertex_price_of_a_cpu_machine_is_reproduced(prices: Prices) -> None:
    assert prices.machine("n1-standard-4", "", 0, "us-central1", "standard").usd_per_hour == pytest.approx(0.21849885)


def test_attached_gpus_are_added_to_the_machines_price(prices: Prices) -> None:
    alone = prices.machine("n1-standard-8", "", 0, "us-central1", "standard")
    with_two = prices.machine("n1-standard-8", "NVIDIA_TESLA_T4", 2, "us-central1", "standard")
    assert alone.usd_per_hour is not None
    assert with_two.usd_per_hour == pytest.approx(alone.usd_per_hour + 2 * 0.35 * 1.15)


def test_the_fee_of_spot_is_a_share_of_the_standard_price(prices: Prices) -> None:
    spot = prices.hourly["us-central1", "spot", "a3-highgpu-8g"].usd
    standard = prices.hourly["us-central1", "standard", "a3-highgpu-8g"].usd
    assert prices.machine(*H100, "spot").usd_per_hour == pytest.approx(spot + 0.15 * standard)


def test_a_missing_machine_price_gives_none_and_names_it(prices: Prices) -> None:
    quote = prices.machine("a4x-highgpu-4g", "NVIDIA_GB200", 4, "us-central1", "standard")
    assert quote.usd_per_hour is None
    assert quote.missing == ("a4x-highgpu-4g in us-central1, standard",)


def test_a_missing_gpu_price_names_the_gpu_alone(prices: Prices) -> None:
    quote = prices.machine("n1-standard-8", "NVIDIA_TESLA_T4", 1, "europe-west4", "standard")
    assert quote.usd_per_hour is None
    assert quote.missing == ("NVIDIA_TESLA_T4 in europe-west4, standard",)


def test_an_unknown_machine_is_named_with_its_gpu(prices: Prices) -> None:
    quote = prices.machine("z9-huge-1", "NVIDIA_L4", 1, "us-central1", "spot")
    assert quote.usd_per_hour is None
    assert quote.missing == ("z9-huge-1 in us-central1, spot", "NVIDIA_L4 in us-central1, spot")
    assert (quote.date, quote.old) == (None, ())


def test_a_price_without_its_fee_says_so(tmp_path: Path) -> None:
    own = _own(
        tmp_path,
        OWN.replace("standard", "flex_start").replace("true", "false").replace("a3-highgpu-8g", "a4x-highgpu-4g"),
    )
    quote = own.machine("a4x-highgpu-4g", "NVIDIA_GB200", 4, "us-central1", "flex_start")
    assert quote.usd_per_hour == 70
    assert "fee on a4x-highgpu-4g" in quote.missing[0]


def test_sizes_of_a2_with_flex_start_follow_from_their_parts(prices: Prices) -> None:
    """The billing catalogue sells A2 by GPU, vCPU and GiB; the source states the sum for one GPU."""
    assert prices.hourly["us-central1", "flex_start", "a2-highgpu-1g"].usd == 2.02038
    for name, machine in load_catalog().machines.items():
        if name.startswith(("a2-highgpu", "a2-mega")):
            (gpus,) = machine.accelerators["NVIDIA_TESLA_A100"]
            parts = 1.61365 * gpus + 0.01739 * machine.vcpus + 0.00233 * machine.memory_gib
            assert prices.hourly["us-central1", "flex_start", name].usd == pytest.approx(parts, abs=1e-6)


def test_the_two_sources_of_a4_agree(prices: Prices) -> None:
    """The catalogue's slices hold the whole machine: its flex-start is the price page's."""
    standard, flex = (prices.hourly["us-central1", term, "a4-highgpu-8g"] for term in ("standard", "flex_start"))
    assert standard.source != flex.source
    assert standard.usd == 2 * flex.usd


def test_missing_disk_and_storage_prices_are_named(prices: Prices) -> None:
    assert prices.boot_disk("pd-ssd", "mars-1").missing == ("boot disk pd-ssd in mars-1",)
    assert prices.storage("mars-1").missing == ("Cloud Storage in mars-1",)
    assert prices.storage("mars-1").usd_per_gb_month is None


def test_every_kind_of_boot_disk_of_a_machine_with_a_price_has_one_in_the_default_region(prices: Prices) -> None:
    for kind in ("pd-ssd", "pd-standard", "hyperdisk-balanced"):
        assert prices.boot_disk(kind, "us-central1").usd_per_gb_month, kind


def test_storage_has_no_fee(prices: Prices) -> None:
    assert prices.storage("us-central1").usd_per_gb_month == 0.02


@pytest.mark.parametrize(
    ("term", "days"),
    [("standard", OLD_AFTER_DAYS), ("spot", FLOATING_OLD_AFTER_DAYS), ("flex_start", FLOATING_OLD_AFTER_DAYS)],
)
def test_a_price_that_floats_is_old_sooner(prices: Prices, term: Term, days: int) -> None:
    read = date.fromisoformat(prices.hourly["us-central1", term, H100[0]].date)
    names = [load_prices(today=read + timedelta(days=days + more)).machine(*H100, term).old for more in (0, 1)]
    old = f"{H100[0]} in us-central1, {term} ({read})"
    assert (old in names[0], old in names[1]) == (False, True)


def test_the_oldest_part_dates_a_quote(prices: Prices) -> None:
    quote = prices.machine("n1-standard-8", "NVIDIA_TESLA_T4", 1, "us-central1", "standard")
    machine = prices.hourly["us-central1", "standard", "n1-standard-8"]
    gpu = prices.hourly["us-central1", "standard", "NVIDIA_TESLA_T4"]
    assert machine.date < gpu.date
    assert quote.date == machine.date


OWN = """
machines:
  - region: us-central1
    term: standard
    source: our contract
    date: 2026-11-01
    fee_included: true
    usd_per_hour: {a3-highgpu-8g: 70}
"""


def test_an_entry_of_the_users_file_replaces_ours_and_no_other(tmp_path: Path, prices: Prices) -> None:
    own = _own(tmp_path, OWN)
    quote = own.machine(*H100, "standard")
    assert (quote.usd_per_hour, quote.date, quote.sources) == (70.0, "2026-11-01", ("our contract",))
    other = ("g2-standard-12", "NVIDIA_L4", 1, "us-central1", "standard")
    assert own.machine(*other) == prices.machine(*other)


def test_the_spot_fee_is_computed_from_a_price_that_includes_the_fee(tmp_path: Path) -> None:
    quote = _own(tmp_path, OWN).machine(*H100, "spot")
    assert quote.usd_per_hour == pytest.approx(52.9623 + 0.15 * 70 / 1.15)


def test_the_user_may_replace_the_fee(tmp_path: Path) -> None:
    own = _own(tmp_path, "vertex_fee: {share: 0, source: our contract, date: 2026-11-01}")
    assert own.machine("n1-standard-4", "", 0, "us-central1", "standard").usd_per_hour == 0.189999


def test_the_user_may_price_disks_and_storage(tmp_path: Path) -> None:
    own = _own(
        tmp_path,
        """
sources: {us: {title: our contract, date: 2026-11-01}}
boot_disks: [{region: us-central1, source: us, usd_per_gb_month: {hyperdisk-balanced: 0.1}}]
storage: [{source: us, usd_per_gb_month: {us-central1: 0.01}}]
""",
    )
    assert own.boot_disk("hyperdisk-balanced", "us-central1").usd_per_gb_month == pytest.approx(0.115)
    assert own.storage("us-central1").usd_per_gb_month == 0.01


def test_the_user_may_price_instances_of_cloud_run_and_a_misspelt_part_is_refused(tmp_path: Path) -> None:
    table = "cloud_run: [{region: us-west1, source: us, date: 2026-11-01, usd_per_s: {vcpu: 0.5, gib: 0.25, %s: 2}}]"
    quote = _own(tmp_path, table % "NVIDIA_L4").instance(4, 16, "NVIDIA_L4", "us-west1", in_zones=False)
    assert (quote.usd_per_hour, quote.sources) == (3600 * (4 * 0.5 + 16 * 0.25 + 2), ("us",))
    unknown = load_prices().instance(8, 32, "NVIDIA_L4", "us-west1", in_zones=True)
    assert unknown.usd_per_hour is None and "NVIDIA_L4_in_zones of Cloud Run in us-west1" in unknown.missing
    with pytest.raises(ConfigError, match="found NVIDIA_L40, expected one of vcpu, gib, NVIDIA_L4"):
        _own(tmp_path, table % "NVIDIA_L40")


ENTRY = "machines: [{{region: us-central1, term: {term}, source: us, {date}usd_per_hour: {{{name}: {price}}}}}]"
GOOD = {"term": "spot", "date": "date: 2026-11-01, ", "name": "a2-highgpu-1g", "price": "1.5"}


@pytest.mark.parametrize(
    ("change", "entry", "found", "expected"),
    [
        ({"price": "-1"}, "machines[0].usd_per_hour.a2-highgpu-1g", "-1", "a number of at least 0"),
        ({"price": "'1.5'"}, "machines[0].usd_per_hour.a2-highgpu-1g", '"1.5"', "a number of at least 0"),
        ({"price": "true"}, "machines[0].usd_per_hour.a2-highgpu-1g", "true", "a number of at least 0"),
        ({"price": "1e999"}, "machines[0].usd_per_hour.a2-highgpu-1g", "Infinity", "a number of at least 0"),
        ({"term": "cheap"}, "machines[0].term", '"cheap"', "one of standard, spot, flex_start"),
        ({"name": "a2-highgpu-3g"}, "machines[0].usd_per_hour", "a2-highgpu-3g", "did you mean a2-highgpu-"),
        ({"date": ""}, "machines[0].date", "no date", "the day on which 'us' was read"),
        ({"date": "date: soon, "}, "machines[0].date", '"soon"', "a date such as 2026-11-20"),
        ({"date": "date: 20261101, "}, "machines[0].date", "20261101", "a date such as 2026-11-20"),
        ({"date": "date: 2026-11-01, terms: x, "}, "machines[0].terms", "an unknown key", "did you mean term?"),
    ],
)
def test_a_wrong_entry_of_the_users_file_is_named(
    tmp_path: Path, change: dict[str, str], entry: str, found: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _own(tmp_path, ENTRY.format(**(GOOD | change)))
    text = caught.value.text()
    assert str(tmp_path / "own.yaml") in text
    assert f"{entry}: found {found}" in text
    assert expected in text
    assert caught.value.code == ExitCode.CONFIG


def test_the_entry_that_the_broken_ones_vary_is_valid(tmp_path: Path) -> None:
    assert _own(tmp_path, ENTRY.format(**GOOD)).hourly["us-central1", "spot", "a2-highgpu-1g"].usd == 1.5


def test_all_wrong_entries_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _own(tmp_path, "machines: [{term: x}]\nstorage: 5")
    text = caught.value.text()
    assert all(entry in text for entry in ("machines[0].term", "machines[0].region", "machines[0].source", "storage"))


def test_a_gpu_that_is_part_of_a_machine_has_no_price_of_its_own(tmp_path: Path) -> None:
    entry = ENTRY.format(**(GOOD | {"name": "NVIDIA_L4"})).replace("machines:", "accelerators:")
    with pytest.raises(ConfigError, match=r"found NVIDIA_L4, expected one of NVIDIA_TESLA_P100"):
        _own(tmp_path, entry)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"- 1", "is a list"),
        (b"machines: [", "not valid YAML"),
        (b"\xff\xfe", "is not text"),
        (b"a" * (1 << 20) + b"b", "at most 1,048,576 bytes"),
    ],
    ids=["empty", "list", "broken", "binary", "huge"],
)
def test_a_file_that_holds_no_tables_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        load_prices(str(path), today=TODAY)


def test_a_missing_prices_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prices file") as caught:
        load_prices(str(tmp_path / "none.yaml"), today=TODAY)
    assert "plan.prices_file" in caught.value.text()


@pytest.mark.parametrize("term", get_args(Term))
def test_the_planners_page_lists_the_machines_without_a_price(prices: Prices, term: Term) -> None:
    page = (ROOT / "docs/reference/planner.md").read_text(encoding="utf-8")
    (listed,) = re.findall(rf"^\| {term} \| (.*`a4x.*) \|$", page, re.MULTILINE)
    patterns = re.findall(r"`([^`]+)`", listed)
    machines = [name for name, machine in load_catalog().machines.items() if machine.accelerators_fixed]
    unpriced = {name for name in machines if ("us-central1", term, name) not in prices.hourly}
    assert unpriced == {name for name in machines if any(fnmatch(name, pattern) for pattern in patterns)}
