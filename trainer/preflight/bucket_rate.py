"""How fast this machine writes to and reads from the run's folder."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.transfer import in_parallel

FILES = 8  # as many streams as checkpoints are written with at least
MIB = 1 << 20


@dataclass(frozen=True)
class BucketRate:
    """Rates of a bucket in 10^9 bytes per second, over several files together."""

    write_gbytes_per_s: float
    read_gbytes_per_s: float


def measure_bucket(run_uri: str, total_mib: int) -> BucketRate:
    """Write random bytes into a folder of the run's, read them back with their checksums, and delete them.

    Raises UserError as the store does. That the account may delete, the launcher has tried (node.py).
    """
    store, folder = open_storage(run_uri), f"probe/bytes-{secrets.token_hex(6)}"
    names = [f"{folder}/{number}" for number in range(FILES)]
    with tempfile.TemporaryDirectory(prefix="vlmpipe-probe-") as scratch:
        here = {name: Path(scratch, str(number)) for number, name in enumerate(names)}
        data = os.urandom(max(1, total_mib * MIB // FILES))
        for path in here.values():
            path.write_bytes(data)
        write_s = _seconds(lambda name: store.upload(here[name], name), names)
        for path in here.values():
            path.unlink()
        read_s = _seconds(lambda name: store.download(name, here[name]), names)
    store.delete_folder(folder)
    num_bytes = len(data) * FILES
    return BucketRate(num_bytes / write_s / 1e9, num_bytes / read_s / 1e9)


def _seconds(transfer: Callable[[str], None], names: list[str]) -> float:
    began_s = time.perf_counter()
    for _ in in_parallel(transfer, names, threads=FILES):
        pass
    return time.perf_counter() - began_s
