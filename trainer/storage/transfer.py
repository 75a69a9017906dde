"""Ordered `map` over threads with bounded memory; the first error ends it.

One stream of Cloud Storage carries far less than a network card: 4 to 8 in parallel do. The client library's own
transfer manager hides errors in its results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from vlmpipe.trainer.threads import thread_pool

Item = TypeVar("Item")
Result = TypeVar("Result")

DELETING = 16  # threads; each waits for a bucket's answer, some 70 ms, and holds no memory
THREADS = 4  # each holds one upload's chunk in memory (gcs.UPLOAD_CHUNK_BYTES)


def in_parallel(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    threads: int = THREADS,
    ahead: int = 2,
    weigh: Callable[[Item], int] = lambda item: 0,
    max_bytes: int = 0,
    is_short: Callable[[Item], bool] = lambda item: False,
) -> Iterator[Result]:
    """Results in the order of the items.

    The first error in time is raised once the running calls have ended; no further call begins.

    Args:
        ahead: items taken from `items` for each thread before a result is needed.
        weigh: bytes that an item and its result hold.
        max_bytes: bound on the weight of all items held; a heavier item is held alone.
        is_short: whether the call takes less than handing it to a thread does; such calls run in this thread, unless
            others are under way.
    """
    failed: list[Exception] = []

    def call(item: Item) -> Result:
        if failed:  # it was waiting for a thread when another one failed
            raise failed[0]
        try:
            return function(item)
        except Exception as error:
            failed.append(error)
            raise

    pool = thread_pool(threads, name="transfer")
    pending: deque[tuple[Future[Result], int]] = deque()
    held_bytes = 0
    try:
        for item in items:
            weight = weigh(item)
            while pending and (len(pending) == ahead * threads or held_bytes + weight > max_bytes):
                future, freed = pending.popleft()
                yield future.result()
                held_bytes -= freed
            if failed:
                break
            if not pending and is_short(item):
                yield call(item)
                continue
            pending.append((pool.submit(call, item), weight))
            held_bytes += weight
        while pending:
            yield pending.popleft()[0].result()
    except Exception:
        if failed:
            raise failed[0]  # noqa: B904 - of several errors, the first in time
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
