"""Renews the machine prices of prices.yaml from a kept copy of their source, and shows the difference first.

    python -m vlmpipe.catalog.renewal pricing.yml --source ce-2026-08-20 --date 2026-11-29
    python -m vlmpipe.catalog.renewal pricing.yml --source ce-2026-08-20 --date 2026-11-29 --write

The file is the pricing.yml of Cyclenerd/google-cloud-pricing-cost-calculator, which compiles the Cloud Billing
catalogue: compute.instance.MACHINE.cost.REGION.hour and hour_spot. A file that ends with .json has the catalogue's own
SKUs, see `vlmpipe.catalog.billing_skus`. A table of which it lacks a price is left whole,
with its old day. Comments and the order of prices.yaml stay.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from vlmpipe.catalog.billing_skus import read_costs
from vlmpipe.catalog.machines import FOLDER
from vlmpipe.catalog.price_schema import parse_prices
from vlmpipe.catalog.prices import FILE_NAME
from vlmpipe.config.yaml_loader import packaged_yaml, read_mapping, read_text
from vlmpipe.trainer.errors import ConfigError

FIELDS = {"standard": "hour", "spot": "hour_spot"}
TABLE = re.compile(r"^  - source: (?P<source>\S+)\n    region: (?P<region>\S+)\n    term: (?P<term>\S+)$", re.MULTILINE)
PRICE = re.compile(r"^      (?P<name>[a-z0-9-]+): (?P<usd>[0-9.]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Change:
    """A price before and after."""

    name: str  # machine, region and term
    old_usd: float
    new_usd: float

    @property
    def share(self) -> float:
        """The change as a share of the old price."""
        return (self.new_usd - self.old_usd) / self.old_usd


@dataclass(frozen=True)
class Renewal:
    """prices.yaml with renewed tables, and how it differs."""

    text: str
    changes: tuple[Change, ...] = ()
    equal: int = 0  # prices that are as before, with a later day
    left: tuple[str, ...] = ()  # tables that the file does not have whole, each with the missing machines

    def lines(self) -> list[str]:
        """The difference, for people; the largest change first."""
        lines = [f"{len(self.changes)} prices change, {self.equal} stay; {len(self.left)} tables are left as they are"]
        for change in sorted(self.changes, key=lambda change: -abs(change.share)):
            lines.append(f"  {change.name}: {change.old_usd:g} -> {change.new_usd:g} ({change.share:+.1%})")
        return [*lines, *(f"  left: {table}" for table in self.left)]


@dataclass(frozen=True)
class Origin:
    """Title and address of a source in prices.yaml."""

    title: str
    url: str


SKUS = Origin(
    "Cloud Billing Catalog API, SKUs of Compute Engine; a machine costs the sum of its vCPUs, memory and GPUs",
    "https://cloudbilling.googleapis.com/v1/services/6F81-5844-456A/skus",
)


def renewed(text: str, costs: Mapping[str, object], source: str, day: date, origin: Origin | None = None) -> Renewal:
    """`text`, that of prices.yaml, with the tables of `source` from `costs`, which is compute.instance of the file.

    origin: of the new prices; None is that of the old ones, on a later day.

    Raises ConfigError for a source that has no table of machines.
    """
    new_source = f"{re.sub(r'-?[0-9]{4}-[0-9]{2}-[0-9]{2}$', '', source)}-{day}"
    blocks = list(_blocks(text, source))
    if re.search(rf"^  {re.escape(new_source)}:$", text, re.MULTILINE):
        raise ConfigError(
            f"{FILE_NAME} has a source {new_source} already",
            expected=f"a day later than that of {source}, and of no other source of its name",
        )
    if not blocks:
        raise ConfigError(
            f"no table of machines of {FILE_NAME} is from {source!r}",
            expected="a key of its sources, such as ce-2026-08-20",
        )
    renewal = Renewal(text)
    for block in blocks:
        renewal = _with_table(renewal, block, costs, new_source)
    if renewal.changes or renewal.equal:
        renewal = replace(renewal, text=_with_source(renewal.text, source, new_source, day, origin))
    parse_prices(packaged_yaml(renewal.text), FILE_NAME)
    return renewal


@dataclass(frozen=True)
class _Block:
    """A table's text, from its source to its last price."""

    text: str
    region: str
    term: str


def _blocks(text: str, source: str) -> Iterator[_Block]:
    machines = text[text.index("\nmachines:\n") : text.index("\naccelerators:\n")]
    starts = list(TABLE.finditer(machines))
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        if start["source"] == source and start["term"] in FIELDS:
            end = following.start() if following else len(machines)
            yield _Block(machines[start.start() : end], start["region"], start["term"])


def _with_table(renewal: Renewal, block: _Block, costs: Mapping[str, object], new_source: str) -> Renewal:
    """The renewal with this table's prices; without them where one is missing."""
    old = {price["name"]: float(price["usd"]) for price in PRICE.finditer(block.text)}
    new = {name: _usd(costs, name, block) for name in old}
    where = f"{block.region}, {block.term}"
    if missing := [name for name, usd in new.items() if usd is None]:
        return replace(renewal, left=(*renewal.left, f"{where}: no price of {', '.join(missing)}"))
    known = {name: usd for name, usd in new.items() if usd is not None}
    changes = [
        Change(f"{name} in {where}", usd, known[name]) for name, usd in old.items() if f"{usd:g}" != f"{known[name]:g}"
    ]
    lines = PRICE.sub(lambda price: f"      {price['name']}: {known[price['name']]!r}", block.text)
    lines = re.sub(r"^  - source: \S+", f"  - source: {new_source}", lines, count=1)
    return Renewal(
        renewal.text.replace(block.text, lines, 1),
        (*renewal.changes, *changes),
        renewal.equal + len(old) - len(changes),
        renewal.left,
    )


def _usd(costs: Mapping[str, object], name: str, block: _Block) -> float | None:
    instance = costs.get(name)
    regions = instance.get("cost") if isinstance(instance, Mapping) else None
    cost = regions.get(block.region) if isinstance(regions, Mapping) else None
    usd = cost.get(FIELDS[block.term]) if isinstance(cost, Mapping) else None
    return float(usd) if isinstance(usd, int | float) and not isinstance(usd, bool) and usd > 0 else None


def _with_source(text: str, source: str, new_source: str, day: date, origin: Origin | None) -> str:
    """The text with the new source after the old one, which leaves once no table names it."""
    entry = re.search(rf"^  {re.escape(source)}:\n(?:    .*\n)+", text, re.MULTILINE)
    assert entry, source
    lines = entry[0].replace(f"  {source}:", f"  {new_source}:", 1)
    lines = re.sub(r"^    date: .*$", f"    date: {day}", lines, flags=re.MULTILINE)
    if origin:
        lines = f"  {new_source}:\n    title: {origin.title}\n    url: {origin.url}\n    date: {day}\n"
    is_used = f"source: {source}\n" in text
    return text.replace(entry[0], entry[0] + lines if is_used else lines, 1)


def _compiled_costs(file: Path) -> Mapping[str, object]:
    """compute.instance of a pricing.yml. Raises ConfigError for another file."""
    compute = read_mapping(file, read_text(file, "a kept price file"), "compute.instance").get("compute")
    costs = compute.get("instance") if isinstance(compute, Mapping) else None
    if not isinstance(costs, Mapping):
        raise ConfigError(f"{file} has no compute.instance", expected="the pricing.yml that prices.yaml names")
    return costs


def main(arguments: Sequence[str] | None = None) -> None:
    """Show the difference; with --write, write prices.yaml."""
    parser = argparse.ArgumentParser(
        prog="python -m vlmpipe.catalog.renewal", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("file", type=Path, help="kept copy of pricing.yml, or .json: SKUs of the Cloud Billing Catalog")
    parser.add_argument("--source", required=True, help="key in the sources of prices.yaml whose tables are renewed")
    parser.add_argument("--date", required=True, type=date.fromisoformat, help="day of the file's prices")
    parser.add_argument(
        "--write", action="store_true", help="write prices.yaml; without it only the difference is shown"
    )
    options = parser.parse_args(arguments)
    is_list = options.file.suffix == ".json"
    costs = read_costs(options.file) if is_list else _compiled_costs(options.file)
    path = FOLDER / FILE_NAME
    origin = SKUS if is_list else None
    result = renewed(path.read_text(encoding="utf-8"), costs, options.source, options.date, origin)
    print("\n".join(result.lines()))
    if not options.write:
        print("Nothing is written: --write does, and python -m tests.support.generated_files renews the page.")
    else:
        path.write_text(result.text, encoding="utf-8")
        print(f"{path} is written")


if __name__ == "__main__":
    main()
