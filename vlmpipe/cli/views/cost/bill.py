"""The bill of a run in a few lines: the whole run, a million tokens, a month of serving, and what services ask."""

from __future__ import annotations

from collections.abc import Iterator

from vlmpipe.cli.views.amounts import UNKNOWN, amount
from vlmpipe.planner.spending.approval import dollars
from vlmpipe.records.plan_json import BillJson, ServingJson


def bill_lines(bill: BillJson) -> Iterator[tuple[str, str]]:
    """Labelled lines of `Bill.as_dict()`."""
    if bill["whole_usd"] is not None:
        least = "at least " if bill["is_lower_bound"] or None in (bill["requests_usd"], bill["network_usd"]) else ""
        network = "none in one region" if bill["network_usd"] == 0 else amount(bill["network_usd"])
        parts = f"jobs and steps {amount(bill['usd'])}, requests {amount(bill['requests_usd'])}, network {network}"
        yield "Whole run", f"{least}{amount(bill['whole_usd'])}: {parts}."
    else:
        yield "Whole run", f"{UNKNOWN}: hours or a price of training are not known."
    tokens, samples = bill["usd_per_million_tokens"], bill["usd_per_thousand_samples"]
    if tokens is not None and samples is not None:
        of = f"of {_count(bill['tokens'])} tokens and {_count(bill['samples'])} samples in all passes"
        yield "Training", f"{_price(tokens)} a million tokens, {_price(samples)} a thousand samples, {of}."
    if serving := bill["serving"]:
        yield "Serving", _serving(serving)
    elif if_deployed := bill.get("if_deployed"):
        yield "Serving", f"not by this run file; with deploy, {_serving(if_deployed)[:-1]}; $0 while it sleeps."
    elif obstacle := bill.get("not_deployable"):
        yield "Serving", f"not by this run file, and no month can be stated: {obstacle}."
    if (managed := bill["managed"]) and tokens is not None:
        ends = dict.fromkeys(map(dollars, (managed["low_usd"], managed["high_usd"])))
        yield (
            "Market",
            f"managed tuning of text-only models is sold at {' to '.join(ends)} a million tokens ({managed['date']}; "
            "vlmpipe docs prices).",
        )


def _serving(serving: ServingJson) -> str:
    low, high, month = serving["min_replicas"], serving["max_replicas"], serving["usd_per_month"]
    if month is None:
        return f"a month {UNKNOWN}: no price of {', '.join(serving['missing'])}."
    least = "at least " if serving["missing"] else ""
    if (wake := serving.get("usd_per_wake")) is not None:
        return (
            f"$0 a month while no question comes, as {serving['machines']} sleeps; {least}{amount(wake)} each time "
            "that one wakes it, until it sleeps again, and its start, of unknown length, in which questions wait or "
            f"are refused; up to {amount(serving['most_usd_per_month'])} a month with {high}."
        )
    text = f"{least}{amount(month)} a month for {low} x {serving['machines']}, also while no question comes"
    return text + (f"; up to {amount(serving['most_usd_per_month'])} with {high}." if high > low else ".")


def _price(usd: float) -> str:
    """Dollars with two digits also where they are few."""
    return f"${usd:.2g}" if 0 < usd < 0.1 else amount(usd)


def _count(number: float | None) -> str:
    if number is None:
        return UNKNOWN
    for limit, unit in ((1e9, "G"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:,.3g}{unit}"
    return f"{number:,.0f}"
