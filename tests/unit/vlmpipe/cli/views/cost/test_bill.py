"""The bill on the screen: amounts with their unit, nothing unknown as 0, and no line of what is not there."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from vlmpipe.catalog.managed_offers import ManagedRange
from vlmpipe.cli.views.cost.bill import bill_lines
from vlmpipe.planner.cost.bill import Bill, ServingCost
from vlmpipe.records.plan_json import BillJson

SERVING = ServingCost("g2-standard-12", 1, 2, 730.4, 1460.8, ())
MANAGED = ManagedRange(0.46, 4.18, ("a seller",), "2026-11-29")
BILL = Bill(20.0, 0.5, 0.0, 4.8, False, 50e6, 60_000, SERVING, MANAGED)


def printed(bill: Bill) -> str:
    return " ".join(f"{name} {text}" for name, text in bill_lines(cast(BillJson, bill.as_dict())))


def test_a_known_bill_names_the_run_its_units_the_month_and_the_market() -> None:
    assert printed(BILL) == (
        "Whole run $20.50: jobs and steps $20.00, requests $0.50, network none in one region. "
        "Training $0.41 a million tokens, $0.34 a thousand samples, of 50M tokens and 60,000 samples in all passes. "
        "Serving $730 a month for 1 x g2-standard-12, also while no question comes; up to $1,461 with 2. "
        "Market managed tuning of text-only models is sold at $0.46 to $4.18 a million tokens (2026-11-29; vlmpipe "
        "docs prices)."
    )


def test_a_sleeping_endpoint_says_what_a_start_costs_and_that_its_length_is_not_known() -> None:
    sleeping = replace(SERVING, min_replicas=0, usd_per_month=0.0, usd_per_wake=1.0)
    assert (
        "Serving $0 a month while no question comes, as g2-standard-12 sleeps; $1.00 each time that one wakes it, "
        "until it sleeps again, and its start, of unknown length, in which questions wait or are refused; up to $1,461 "
        "a month with 2." in printed(replace(BILL, serving=sleeping))
    )


def test_a_run_that_deploys_nothing_has_the_month_of_a_machine_for_its_model_or_why_there_is_none() -> None:
    nothing = replace(BILL, serving=None, if_deployed=replace(SERVING, max_replicas=1))
    assert (
        "Serving not by this run file; with deploy, $730 a month for 1 x g2-standard-12, also while no question comes; "
        "$0 while it sleeps." in printed(nothing)
    )
    assert "Serving not by this run file, and no month can be stated: it has a relevance module." in printed(
        replace(BILL, serving=None, not_deployable="it has a relevance module")
    )


def test_what_is_not_known_makes_the_sum_a_lower_bound() -> None:
    text = printed(replace(BILL, requests_usd=None, network_usd=None))
    assert "Whole run at least $20.00: jobs and steps $20.00, requests unknown, network unknown." in text


def test_an_unknown_run_says_so_and_has_no_market_to_compare_with() -> None:
    unknown = "Whole run unknown: hours or a price of training are not known."
    assert printed(replace(BILL, usd=None, serving=None)) == unknown
    unpriced = replace(SERVING, usd_per_month=None, most_usd_per_month=None, missing=("x in us-central1, standard",))
    text = printed(replace(BILL, usd=None, serving=unpriced))
    assert text == f"{unknown} Serving a month unknown: no price of x in us-central1, standard."


def test_a_small_price_keeps_two_digits() -> None:
    assert "$0.012 a million tokens" in printed(replace(BILL, usd=0.1))
