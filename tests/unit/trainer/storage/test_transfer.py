"""Many files at once: order, bounded look-ahead, and the first error ends it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage.transfer import in_parallel

WAIT_S = 10


def test_no_more_calls_run_at_once_than_there_are_threads() -> None:
    together = threading.Barrier(3)  # broken unless three run at once

    def call(number: int) -> int:
        together.wait(WAIT_S)
        return number

    assert list(in_parallel(call, range(9), threads=3)) == list(range(9))


def test_short_calls_run_in_the_callers_thread_and_in_order() -> None:
    def call(number: int) -> tuple[int, bool]:
        return number, threading.current_thread() is threading.main_thread()

    results = list(in_parallel(call, range(40), threads=2, is_short=lambda number: not 10 <= number < 20))
    assert [number for number, _ in results] == list(range(40))
    assert all(is_here == (number < 10) for number, is_here in results[:20])


def test_items_are_taken_only_a_little_ahead() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(1000):
            taken += 1
            yield number

    results = in_parallel(lambda number: number, items(), threads=2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    assert taken <= 3 + 2 * 2
    results.close()
    assert taken < 1000


def test_the_first_error_in_time_wins_and_nothing_further_is_begun() -> None:
    """The second item fails while the first still runs: it is its error, and items behind are never begun."""
    failed, begun = threading.Event(), []
    of_others = set(threading.enumerate())  # an earlier test's caught error may still hold a suspended iteration

    def call(number: int) -> None:
        begun.append(number)
        if number == 1:
            failed.set()
            raise UserError("item 1")
        assert failed.wait(WAIT_S)
        raise UserError(f"item {number}, later")

    with pytest.raises(UserError, match=r"item 1$"):
        list(in_parallel(call, range(100), threads=2))
    assert len(begun) <= 3, "the two threads, and one more that may have begun before the error was known"
    assert set(threading.enumerate()) <= of_others, "its threads have ended"


@settings(deadline=None, max_examples=100)
@given(weights=st.lists(st.integers(0, 12), max_size=40), threads=st.integers(1, 4))
def test_held_items_stay_within_the_bound_unless_one_alone_exceeds_it(weights: list[int], threads: int) -> None:
    held: dict[int, int] = {}
    lock = threading.Lock()
    most: list[tuple[int, int]] = []

    def work(item: tuple[int, int]) -> tuple[int, int]:
        number, weight = item
        with lock:
            held[number] = weight
            most.append((sum(held.values()), len(held)))
        return item

    seen = []
    items = enumerate(weights)
    for number, _ in in_parallel(work, items, threads=threads, weigh=lambda item: item[1], max_bytes=10):
        seen.append(number)
        with lock:
            held.pop(number)
    assert seen == list(range(len(weights)))
    assert all(weight <= 10 or count == 1 for weight, count in most)
    assert all(count <= 2 * threads for _, count in most)
