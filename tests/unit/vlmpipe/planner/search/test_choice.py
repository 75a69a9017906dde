"""Differences below a forecast's error do not decide; plainness and few nodes do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlmpipe.planner.search.choice import Choice, ordered, worth_its_nodes


@dataclass(frozen=True)
class Way:
    strategy: str
    nodes: int
    value: float
    hours: float = 1.0


def chosen(ways: Sequence[Way]) -> Way | None:
    choice = Choice[Way]()
    for way in sorted(ways, key=lambda way: way.value):
        if choice.wants(way):
            choice.take(way)
    return choice.way


def test_within_the_error_the_plainest_strategy_on_the_fewest_nodes_is_chosen() -> None:
    exotic, plain, wide = Way("tp+pp+dp", 1, 100.0), Way("fsdp", 2, 110.0), Way("fsdp", 4, 105.0)
    assert chosen([exotic, wide, plain]) == plain
    assert chosen([exotic, Way("ddp", 1, 126.0)]) == exotic, "beyond the error the value decides"
    assert chosen([]) is None


def test_a_way_that_would_not_be_chosen_is_not_looked_at() -> None:
    choice = Choice[Way]()
    choice.take(Way("fsdp", 1, 100.0))
    assert not choice.wants(Way("fsdp", 2, 100.0)) and not choice.wants(Way("tp", 1, 100.0))
    assert choice.wants(Way("ddp", 1, 125.0)) and not choice.wants(Way("ddp", 1, 126.0))


def test_rows_within_the_error_of_the_best_are_ordered_by_plainness_and_others_by_value() -> None:
    exotic, plain, dear, dearer = Way("pp", 1, 100.0), Way("zero2", 1, 120.0), Way("tp", 1, 130.0), Way("ddp", 1, 140.0)
    assert ordered([dearer, exotic, dear, plain]) == [plain, exotic, dear, dearer]


def test_twice_the_nodes_must_save_a_quarter_of_the_hours() -> None:
    hours = {16: 0.5, 8: 0.6, 4: 0.9, 2: 1.7, 1: 3.3}
    ways = {nodes: Way("fsdp", nodes, value, value) for nodes, value in hours.items()}
    assert worth_its_nodes(ways[16], ways.get) == ways[8], "0.5 h save less than a quarter of 0.6 h, 0.6 a third of 0.9"
    assert worth_its_nodes(ways[16], lambda _nodes: None) == ways[16], "no fewer nodes hold it"
