"""Many files at once: a few threads, bounded memory, and the first error ends it.

One stream of Cloud Storage carries far less than a network card: 4 to 8 in parallel do. A plain thread pool over the
storage seam, because the client library's own one hides errors in its results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainer.storage.base import Storage

Item = TypeVar("Item")
Result = TypeVar("Result")

THREADS = 4  # each holds one upload's chunk in memory (storage_gcs.UPLOAD_CHUNK_BYTES)


@dataclass(frozen=True)
class Upload:
    """One file to be sent. `crc32c` is what its bytes must sum to, if whoever wrote it has said so."""

    path: Path
    name: str
    crc32c: int | None = None


def upload_many(store: Storage, uploads: Iterable[Upload], *, threads: int = THREADS) -> None:
    """Send files, several at a time. Raises the first error, after which no further file is begun."""

    def send(upload: Upload) -> None:
        store.upload(upload.path, upload.name, crc32c=upload.crc32c)

    for _ in in_parallel(send, uploads, threads=threads):
        pass


def fetch_many(store: Storage, names: Iterable[str], *, threads: int = THREADS) -> list[Path]:
    """Local files with the objects' bytes, in the order of `names`. Raises the first error; what came before stays."""
    return list(in_parallel(store.fetch, names, threads=threads))


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
