"""Transfers many files with a few threads and bounded memory; the first error ends it.

One stream of Cloud Storage carries far less than a network card: 4 to 8 in parallel do. A plain thread pool over the
storage seam, because the client library's own one hides errors in its results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

THREADS = 4  # each holds one upload's chunk in memory (storage_gcs.UPLOAD_CHUNK_BYTES)


def in_parallel(
    function: Callable[[Item], Result], items: Iterable[Item], *, threads: int = THREADS
) -> Iterator[Result]:
    """Results in the order of the items, which are taken only a little ahead of the work.

    The first error in time is raised, as soon as the calls that run by then have ended; no further one is begun.
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

    pool = ThreadPoolExecutor(threads, thread_name_prefix="transfer")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            if failed:
                break
            waiting.append(pool.submit(call, item))
            if len(waiting) >= 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except Exception:
        if failed:
            raise failed[0]  # noqa: B904 - of several errors, the first in time
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
