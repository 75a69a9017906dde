"""The ordered map over threads: order, and the bound on bytes held."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.prepare.thread_map import map_in_order


@settings(deadline=None, max_examples=100)
@given(weights=st.lists(st.integers(0, 12), max_size=40), threads=st.integers(1, 4))
def test_what_is_held_weighs_at_most_the_bound_or_is_one_item(weights: list[int], threads: int) -> None:
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
    for number, _ in map_in_order(work, items, threads, weigh=lambda item: item[1], max_bytes=10):
        seen.append(number)
        with lock:
            held.pop(number)
    assert seen == list(range(len(weights)))
    assert all(weight <= 10 or count == 1 for weight, count in most)
    assert all(count <= 4 * threads for _, count in most)
