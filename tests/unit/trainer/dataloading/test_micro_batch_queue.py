"""The bounds and the order of the queue between the threads that make micro-batches and training."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.dataloading.micro_batch_queue import FIRST, MicroBatchQueue, Place

DEADLINE_S = 20.0


def make_all(queue: MicroBatchQueue[int], sizes: list[int], makers: int = 1) -> Iterator[threading.Thread]:
    """A producer of items of one image that are their own sizes, of which `makers` are made at a time; it ends when all
    are begun, or the queue is closed."""

    def produce() -> None:
        with ThreadPoolExecutor(makers) as pool:
            for size in sizes:
                if (place := queue.reserve(1, makers)) is None:
                    return
                pool.submit(queue.fill, place, size, held_bytes=size)

    thread = threading.Thread(target=produce)
    thread.start()
    yield thread
    queue.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


@given(sizes=st.lists(st.integers(0, 50), max_size=30), bound=st.integers(1, 100), makers=st.integers(1, 4))
def test_items_come_in_order_and_all_but_those_being_made_are_within_the_bound(
    sizes: list[int], bound: int, makers: int
) -> None:
    queue: MicroBatchQueue[int] = MicroBatchQueue(bound)
    found = []
    for _ in make_all(queue, sizes, makers):
        for _ in sizes:
            with queue._changed:
                held = [place.held_bytes for place in queue._places]
                assert sum(held) == queue._held_bytes and queue._making <= makers
                # Their sizes are known by the largest before: each of the last ones begun may be larger.
                assert sum(sorted(held)[: max(0, len(held) - makers)]) <= bound
            found.append(queue.get())
    assert found == sizes


def test_as_many_are_begun_as_give_each_thread_an_image_and_are_taken_in_order() -> None:
    queue: MicroBatchQueue[str] = MicroBatchQueue(1 << 30)
    first, second = queue.reserve(3, 4), queue.reserve(3, 4)  # the second gives the fourth thread its image
    assert first and second
    begun = []
    thread = threading.Thread(target=lambda: begun.append(queue.reserve(1, 4)), daemon=True)
    thread.start()
    queue.fill(second, "second", held_bytes=10)
    thread.join(DEADLINE_S)
    assert begun
    taken = []
    consumer = threading.Thread(target=lambda: taken.extend(queue.get() for _ in range(2)))
    consumer.start()
    queue.fill(first, "first", held_bytes=10)
    consumer.join(DEADLINE_S)
    assert taken == ["first", "second"]


def test_an_item_above_the_bound_is_made_alone() -> None:
    queue: MicroBatchQueue[int] = MicroBatchQueue(10)
    for _ in make_all(queue, [100, 100, 1], makers=4):
        assert [queue.get() for _ in range(3)] == [100, 100, 1]


def test_once_a_size_is_known_no_more_are_begun_than_fit() -> None:
    queue: MicroBatchQueue[int] = MicroBatchQueue(30)
    place = queue.reserve(1, 8)
    assert place
    queue.fill(place, 1, held_bytes=10)
    assert queue.reserve(1, 8) and queue.reserve(1, 8)
    begun = []
    thread = threading.Thread(target=lambda: begun.append(queue.reserve(1, 8)), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and not begun
    queue.get()
    thread.join(DEADLINE_S)
    assert begun[0]


@pytest.mark.parametrize("begins_step", [True, False])
def test_closing_ends_the_wait_of_a_full_queue(begins_step: bool) -> None:
    queue: MicroBatchQueue[int] = MicroBatchQueue(max_bytes=1, max_steps=1)
    if begins_step:
        assert queue.put(1, begins_step=True)
    else:
        assert queue.reserve(1, 1)
    answers: list[object] = []
    thread = threading.Thread(
        target=lambda: answers.append(queue.put(2, begins_step=True) if begins_step else queue.reserve(1, 1))
    )
    thread.start()
    queue.close()
    thread.join(DEADLINE_S)
    assert answers == ([False] if begins_step else [None])


def test_what_is_made_after_the_end_is_let_go() -> None:
    queue: MicroBatchQueue[int] = MicroBatchQueue()
    place = queue.reserve(1, 1)
    assert place
    queue.close()
    queue.fill(place, 5, held_bytes=5)
    assert place.item is None


def test_until_a_size_is_known_no_more_are_begun_than_plans_count_with() -> None:
    """With 32 threads and an image in each item, 32 items of any size would be begun at once."""
    queue: MicroBatchQueue[int] = MicroBatchQueue(100)
    begun: list[Place[int] | None] = [queue.reserve(1, 32) for _ in range(FIRST)]
    thread = threading.Thread(target=lambda: begun.extend(queue.reserve(1, 32) for _ in range(2)), daemon=True)
    thread.start()
    thread.join(0.05)
    assert len(begun) == FIRST and begun[0]
    queue.fill(begun[0], 0, held_bytes=20)  # 20 that wait and 4 that are being made are 100 bytes
    thread.join(DEADLINE_S)
    assert len(begun) == FIRST + 2
