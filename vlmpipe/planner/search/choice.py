"""The shown ways among all that fit: one a machine, the plainest on the fewest nodes among those that a forecast
cannot tell apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

ERROR = 0.25  # of a forecast: ways whose hours or dollars differ by less are taken as equally good
WORTH = 0.25  # of the hours, that twice as many nodes must save to be the faster way
# The plainest first: what each rank needs to know of others, and how much can go wrong.
STRATEGY_ORDER = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "zero3", "tp", "pp", "tp+pp+dp")


class Way(Protocol):
    @property
    def strategy(self) -> str: ...
    @property
    def nodes(self) -> int: ...
    @property
    def hours(self) -> float: ...
    @property
    def value(self) -> float:
        """Hours or dollars, by the goal."""
        ...


AnyWay = TypeVar("AnyWay", bound=Way)


def plainness(way: Way) -> tuple[int, int, float]:
    """Sorting key: the plainest strategy first, then the fewest nodes, then the goal."""
    return STRATEGY_ORDER.index(way.strategy), way.nodes, way.value


class Choice(Generic[AnyWay]):
    """The plainest of a machine's ways within the error of the best, as they are found, the best first."""

    def __init__(self) -> None:
        self.best: AnyWay | None = None
        self.way: AnyWay | None = None

    def wants(self, way: Way) -> bool:
        """Return whether the way would be chosen if it fits: only then its memory is worth a look."""
        if self.best is None or self.way is None:
            return True
        return way.value <= (1 + ERROR) * self.best.value and plainness(way)[:2] < plainness(self.way)[:2]

    def take(self, way: AnyWay) -> None:
        """A way that fits and is wanted."""
        self.best, self.way = self.best or way, way


def worth_its_nodes(way: AnyWay, on: Callable[[int], AnyWay | None]) -> AnyWay:
    """The way with half as many nodes, again and again, where doubling them saves less than `WORTH` of the hours.

    on: the chosen way with a number of nodes, or None.
    """
    while way.nodes > 1:
        fewer = on(way.nodes // 2)
        if fewer is None or way.hours <= (1 - WORTH) * fewer.hours:
            return way
        way = fewer
    return way


def ordered(rows: Iterable[AnyWay]) -> list[AnyWay]:
    """Ways on different machines: those within the error of the best by plainness, then the others by the goal."""
    by_value = sorted(rows, key=lambda way: way.value)
    similar = [way for way in by_value if way.value <= (1 + ERROR) * by_value[0].value]
    return [*sorted(similar, key=plainness), *by_value[len(similar) :]]
