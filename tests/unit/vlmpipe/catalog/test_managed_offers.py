"""Prices of managed tuning: a table whose sources are dated, and the text-only offers that a plan compares with."""

from __future__ import annotations

import pytest

from vlmpipe.catalog.managed_offers import Method, load_offers, text_only_range


def test_every_offer_has_a_dated_source_and_its_prices_are_in_order() -> None:
    table = load_offers()
    assert {offer.source for offer in table.offers} == table.sources.keys()
    for offer in table.offers:
        assert 1 <= len(offer.usd_per_million_tokens) <= 2 and min(offer.usd_per_million_tokens) > 0
        assert list(offer.usd_per_million_tokens) == sorted(offer.usd_per_million_tokens)
        assert bool(offer.methods) == (offer.parameters is not None)


@pytest.mark.parametrize(
    ("parameters", "method", "ends"),
    [
        (7_000_000_000, "lora", (0.46, 4.18)),
        (7_000_000_000, "full", (0.67, 4.18)),
        (500_000_000, "lora", (0.46, 0.46)),
        (500_000_000, "full", None),
        (400_000_000_000, "lora", None),
    ],
)
def test_offers_are_compared_by_size_and_method_where_they_take_text_alone(
    parameters: int, method: Method, ends: tuple[float, float] | None
) -> None:
    found = text_only_range(parameters, method)
    assert (found and (found.low_usd, found.high_usd)) == ends
    assert found is None or not any("Fireworks" in seller or "OpenAI" in seller for seller in found.sellers)
