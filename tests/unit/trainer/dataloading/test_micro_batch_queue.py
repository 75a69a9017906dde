"""The bounds of the queue between the thread that makes micro-batches and training."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.dataloading.micro_batch_queue import MicroBatchQueue

DEADLINE_S = 20.0


def put_all(queue: MicroBatchQueue[int], sizes: list[int]) -> Iterator[threading.Thread]:
    """A producer of items that are their own sizes; it ends when all are put, or the queue is closed."""
    thread = threading.Thread(target=lambda: all(queue.put(size, held_bytes=size) for size in sizes))
    thread.start()
    yield thread
    queue.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


@given(sizes=st.lists(st.integers(0, 50), max_size=30), bound=st.integers(1, 100))
def test_what_waits_is_within_the_bound_or_one_item_and_comes_in_order(sizes: list[int], bound: int) -> None:
    queue: MicroBatchQueue[int] = MicroBatchQueue(bound)
    found = []
    for _ in put_all(queue, sizes):
        for _ in sizes:
            with queue._changed:
                waiting = [size for _, size, _ in queue._items if size]
                assert sum(waiting) == queue._held_bytes
                assert sum(waiting) <= bound or len(waiting) == 1
            found.append(queue.get())
    assert found == sizes


def test_an_item_above_the_bound_is_let_in_alone() -> None:
    queue: MicroBatchQueue[int] = MicroBatchQueue(10)
    for _ in put_all(queue, [100, 100, 1]):
        assert [queue.get() for _ in range(3)] == [100, 100, 1]


@pytest.mark.parametrize("begins_step", [True, False])
def test_closing_ends_the_wait_of_a_full_queue(begins_step: bool) -> None:
    queue: MicroBatchQueue[int] = MicroBatchQueue(max_bytes=1, max_steps=1)
    assert queue.put(1, held_bytes=1, begins_step=begins_step)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(queue.put(2, held_bytes=1, begins_step=begins_step)))
    thread.start()
    queue.close()
    thread.join(DEADLINE_S)
    assert answers == [False]
