"""Threads that prepare images: order, errors, number."""

from __future__ import annotations

import os
import threading

import pytest

from vlmpipe.trainer.models import image_threads
from vlmpipe.trainer.models.image_threads import for_each, max_threads, more_threads, num_threads, use_threads
from vlmpipe.trainer.sizing.image_preparation import MAX_THREADS


@pytest.fixture(autouse=True)
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_threads, "num_threads", lambda: 3)
    image_threads._pool.cache_clear()


def test_results_come_in_order_from_several_threads_at_once() -> None:
    """Each waits for the two others, so one thread after the other would not do."""
    together = threading.Barrier(3)

    def prepare(item: int) -> tuple[int, int]:
        together.wait(20)
        return item * item, threading.get_ident()

    found = for_each(prepare, [3, 1, 2])
    assert [square for square, _ in found] == [9, 1, 4]
    assert len({thread for _, thread in found}) == 3


def test_the_first_error_is_raised() -> None:
    def prepare(item: int) -> int:
        if item % 2:
            raise ValueError(f"image {item} is damaged")
        return item

    with pytest.raises(ValueError, match="image 1 is damaged"):
        for_each(prepare, [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(2, 1, 2), (2, 2, 1), (1, 4, 1), (96, 8, MAX_THREADS), (12, 4, 3)]
)
def test_ranks_share_the_cores(cores: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert num_threads() == threads  # of the module as it was imported


def test_a_forked_process_has_a_pool_of_its_own() -> None:
    assert for_each(str, [1, 2]) == ["1", "2"]
    pid = os.fork()
    if not pid:
        os._exit(0 if for_each(str, [3, 4]) == ["3", "4"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(("cores", "numbers"), [(26, [8, 16, 26, 26]), (4, [4, 4])])
def test_auto_doubles_up_to_the_ranks_cores_and_a_setting_stays(
    cores: int, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_threads, "num_threads", num_threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    found = []
    for _ in numbers:
        found.append(num_threads())
        assert max_threads() == cores
        assert more_threads() == (num_threads() if num_threads() != found[-1] else 0)
    use_threads(3)
    assert (num_threads(), max_threads(), more_threads()) == (3, 3, 0)
    assert for_each(str, [3, 4, 5]) == ["3", "4", "5"]
    use_threads("auto")
    assert found == numbers and num_threads() == numbers[0]
