"""docs/reference/prices.md, generated from the price tables of vlmpipe/catalog."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta

from tests.support.paths import ROOT
from vlmpipe.catalog.machines import read_yaml
from vlmpipe.catalog.managed_offers import Offer, load_offers
from vlmpipe.catalog.price_schema import FLOATING_OLD_AFTER_DAYS, OLD_AFTER_DAYS, Price, PriceFile
from vlmpipe.catalog.prices import FILE_NAME

PAGE = ROOT / "docs/reference/prices.md"
HEADER = f"""# Prices

How fresh each price table of `vlmpipe plan` is. Prices are data with a source and a day; none is guessed, and a plan
names the missing and the old ones that it uses. Prices of Spot and flex-start are old after {FLOATING_OLD_AFTER_DAYS}
days, others after {OLD_AFTER_DAYS}. Prices of your own contract, in the same form, replace these: `plan.prices_file`.

This page is generated from `vlmpipe/catalog/{FILE_NAME}` and `managed_offers.yaml`:
`python -m tests.support.generated_files`. A test compares it with the files.

## Machines, disks, storage and requests

| prices of | term | number | regions | read on | old from | source |
|---|---|--:|---|---|---|---|
"""
OFFERS = """
## Managed tuning

What services ask for tuning a model on your data, for a million training tokens: the tokens of the data times the
passes. `vlmpipe plan` shows the range of those that take text alone, for supervised training of a model of the same
size with adapters or of most weights, next to [the run's own price](planner.md#the-bill). A service needs no machines,
buckets or pipeline, and counts tokens by its own tokenizer; a run here takes images, keeps its checkpoints, and is
evaluated.

| seller | data | method | parameters | $ a million tokens | read on | source |
|---|---|---|---|--:|---|---|
"""
RENEW = """
## Renew a table

From a clone, with a copy of the source's file that you keep:

```bash
python -m vlmpipe.catalog.renewal pricing.yml --source ce-2026-08-20 --date 2026-11-29           # shows the difference
python -m vlmpipe.catalog.renewal pricing.yml --source ce-2026-08-20 --date 2026-11-29 --write   # writes prices.yaml
python -m tests.support.generated_files                                                          # renews this page
```

The file is the `pricing.yml` of
[Cyclenerd's calculator](https://github.com/Cyclenerd/google-cloud-pricing-cost-calculator), which compiles the Cloud
Billing catalogue. A table of which it lacks a price is left whole with its old day, and named. Other sources, the
disks and the managed offers are renewed by hand.

A file that ends with `.json` is the catalogue itself, as the
[Cloud Billing Catalog API](https://docs.cloud.google.com/billing/v1/how-tos/catalog-api) lists it: all pages of

```bash
curl --header "X-Goog-Api-Key: $KEY" "https://cloudbilling.googleapis.com/v1/services/6F81-5844-456A/skus?currencyCode=USD&pageSize=5000"
```

in one JSON list, each with the `pageToken` of the page before it. A machine costs the sum of its vCPUs, memory and
GPUs, for the families whose SKUs `vlmpipe/catalog/billing_skus.yaml` names: A2 with A100 of 40 GB, C2, E2, G2, N1 and
N2. A test compares such sums with the prices that `prices.yaml` has of us-central1. Other families, machines with
local SSDs, and SKUs in several tiers, other units or other currencies have no price by it. **Not proved:** no list of
the service was read here; its form is that of the API's description.
"""


def prices_page() -> str:
    """The page."""
    return "".join([HEADER, *_tables(), OFFERS, *map(_offer, load_offers().offers), RENEW])


def _tables() -> Iterator[str]:
    """A row for each kind of price, term and source."""
    file = PriceFile.model_validate(read_yaml(FILE_NAME))
    groups: dict[tuple[str, str, str, str, int], list[tuple[Price, str]]] = {}

    def add(kind: str, term: str, region: str, price: Price) -> None:
        key = (kind, term, price.source, price.date, price.old_after_days)
        groups.setdefault(key, []).append((price, region))

    for kind, tables in (("machines", file.machines), ("GPUs of N1 machines", file.accelerators)):
        for table in tables:
            for usd in table.usd_per_hour.values():
                add(kind, table.term, table.region, file.price(table, usd))
    for (region, _), price in file.monthly_disks():
        add("boot disks", "", region, price)
    for region, price in file.monthly_stores():
        add("Cloud Storage", "", region, price)
    for store, prices in file.by_store():
        for price in (prices.class_a, prices.class_b):
            add(f"requests to {store}://", "", "all", price)
    for (region, _), price in file.by_second():
        add("Cloud Run", "", region, price)
    if fee := file.vertex_fee:
        add("Vertex AI's fee", "", "all", file.price(fee, fee.share))
    for (kind, term, source, day, days), prices in groups.items():
        old = date.fromisoformat(day) + timedelta(days=days + 1)
        regions = list(dict.fromkeys(region for _, region in prices))
        where = ", ".join(regions) if len(regions) <= 3 else f"{len(regions)} regions"
        yield f"| {kind} | {term or '–'} | {len(prices)} | {where} | {day} | {old} | {source} |\n"


def _offer(offer: Offer) -> str:
    source = load_offers().sources[offer.source]
    data = {True: "images and text", False: "text alone", None: "images: not said"}[offer.takes_images]
    sizes = offer.parameters
    size = "not published" if sizes is None else f"{_billions(sizes[0])}to {sizes[1] / 1e9:g} billion"
    usd = " to ".join(f"{price:.2f}" for price in offer.usd_per_million_tokens)
    method = " and ".join({"lora": "adapters", "full": "all weights"}[method] for method in offer.methods) or "not said"
    return f"| {offer.seller} | {data} | {method} | {size} | {usd} | {source.date} | [{source.title}]({source.url}) |\n"


def _billions(parameters: float) -> str:
    return f"{parameters / 1e9:g} " if parameters else "up "
