"""Prices of managed tuning services, from `catalog/managed_offers.yaml`: what a plan's dollars a token compare with."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import date
from typing import Literal

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from vlmpipe.catalog.machines import read_yaml

FILE_NAME = "managed_offers.yaml"
Method = Literal["lora", "full"]
_STRICT = ConfigDict(extra="forbid")


@checked(frozen=True, config=_STRICT)
class OfferSource:
    """Where a price was read, and when."""

    title: str
    url: str
    date: date


@checked(frozen=True, config=_STRICT)
class Offer:
    """A price of tuning. takes_images: None where the source does not say; parameters: None where it names no sizes."""

    seller: str
    source: str  # a key of `sources`
    takes_images: bool | None
    methods: tuple[Method, ...]
    parameters: tuple[float, float] | None
    usd_per_million_tokens: tuple[float, ...]  # one price, or the range over its models

    def is_for(self, parameters: int, method: Method) -> bool:
        """Return whether a model of this size can be tuned so."""
        sizes = self.parameters
        return sizes is not None and sizes[0] <= parameters <= sizes[1] and method in self.methods


@checked(frozen=True, config=_STRICT)
class Offers:
    """The table."""

    sources: dict[str, OfferSource]
    offers: tuple[Offer, ...]


@dataclass(frozen=True)
class ManagedRange:
    """Prices of text-only offers for one size and method."""

    low_usd: float  # a million training tokens
    high_usd: float
    sellers: tuple[str, ...]
    date: str  # on which the oldest was read


@functools.cache
def load_offers() -> Offers:
    """All offers."""
    return TypeAdapter(Offers).validate_python(read_yaml(FILE_NAME))


def text_only_range(parameters: int, method: Method) -> ManagedRange | None:
    """Prices of offers that take text alone; None where there is none for this size and method."""
    table = load_offers()
    fitting = [offer for offer in table.offers if offer.takes_images is False and offer.is_for(parameters, method)]
    if not fitting:
        return None
    prices = [usd for offer in fitting for usd in offer.usd_per_million_tokens]
    oldest = min(table.sources[offer.source].date for offer in fitting)
    return ManagedRange(min(prices), max(prices), tuple(offer.seller for offer in fitting), oldest.isoformat())
