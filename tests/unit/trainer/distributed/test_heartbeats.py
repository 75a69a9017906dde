"""Machines that vanish without closing a connection are noticed by the signs of life that they no longer give."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.distributed import heartbeats
from vlmpipe.trainer.distributed.heartbeats import INTERVAL_S, Heartbeats, now_doing
from vlmpipe.trainer.errors import ExitCode, UserError

SILENT_S = 600.0
TURNS = int(SILENT_S / INTERVAL_S)


class Nodes:
    """Nodes that beat in turns, on one store and one clock."""

    def __init__(self, count: int) -> None:
        self.now_s, self.store = 0.0, dist.HashStore()
        clock = lambda: self.now_s  # noqa: E731
        self.hearts = [Heartbeats(node, count, silent_s=SILENT_S, clock=clock) for node in range(count)]

    def turn(self, living: set[int], *, store_answers: bool = True, seconds: float = INTERVAL_S) -> dict[int, str]:
        """What each living node finds, where it finds anything."""
        self.now_s += seconds
        found = {}
        for node in 2 * sorted(living):  # so that each reads what later ones write
            if store_answers:
                self.hearts[node].exchange(self.store)
        for node in sorted(living):
            try:
                self.hearts[node].judge()
            except UserError as error:
                assert error.code == ExitCode.UNEXPECTED
                found[node] = error.found
        return found


@given(st.integers(2, 5), st.data())
def test_every_living_node_finds_exactly_those_that_are_silent(count: int, data: st.DataObject) -> None:
    nodes = Nodes(count)
    lost = data.draw(st.sets(st.integers(1, count - 1), min_size=1, max_size=count - 1))
    living = set(range(count)) - lost
    for _ in range(data.draw(st.integers(1, 3))):
        assert nodes.turn(set(range(count))) == {}
    for _ in range(TURNS - 1):
        assert nodes.turn(living) == {}
    found = nodes.turn(living) | nodes.turn(living)  # one that beats before the lost ones did has read them once more
    assert found.keys() == living
    for text in found.values():
        assert all((f"node {node} (" in text) == (node in lost) for node in range(count))


def test_a_lost_node_is_named_with_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "_doing", "")
    nodes = Nodes(2)
    now_doing("saving step 120")
    nodes.turn({0, 1})
    found = [nodes.turn({0}) for _ in range(TURNS + 1)][-1]
    assert found == {0: "no sign of life for 600 s from node 1 (saving step 120)"}


def test_without_an_answer_of_the_store_only_the_machine_that_holds_it_is_lost() -> None:
    nodes = Nodes(3)
    nodes.turn({0, 1, 2})
    for _ in range(TURNS - 1):
        assert nodes.turn({0, 1, 2}, store_answers=False) == {}
    found = nodes.turn({0, 1, 2}, store_answers=False)
    assert found.keys() == {1, 2} and all("from node 0 (" in text for text in found.values())


def test_a_store_that_answers_again_ends_the_silence() -> None:
    nodes = Nodes(2)
    for _ in range(3):
        for _ in range(TURNS - 1):
            assert nodes.turn({0, 1}, store_answers=False) == {}
        assert nodes.turn({0, 1}) == {}


def test_time_in_which_this_process_was_frozen_does_not_count() -> None:
    nodes = Nodes(2)
    nodes.turn({0, 1})
    assert nodes.turn({0}, seconds=100 * SILENT_S) == {}


def test_an_error_of_the_store_is_no_answer() -> None:
    class Away:
        def set(self, key: str, value: str, /) -> None:
            raise dist.DistNetworkError("connection reset")

        check = get = set  # type: ignore[assignment]

    heart = Heartbeats(1, 2, silent_s=2 * INTERVAL_S)
    heart.exchange(Away())  # type: ignore[arg-type]
    heart.judge()
