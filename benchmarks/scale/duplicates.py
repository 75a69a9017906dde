"""Part `duplicates`: what preparation keeps on disk of every sample to find duplicates and groups, by their number."""

from __future__ import annotations

import itertools
import resource
import sqlite3
import time
from collections.abc import Callable

import numpy as np

from benchmarks.scale.private_memory import MIB, private_mib
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.prepare.digest_files import DIGEST_BYTES, ROW
from vlmpipe.trainer.data.prepare.split_groups import SampleGroups
from vlmpipe.trainer.data.prepare.validation.deduplicate import ContentCounts, SeenIds
from vlmpipe.trainer.data.sample import stable_digest

SIZES = (100_000, 1_000_000, 10_000_000)
AT_ONCE = 16_384  # samples of a chunk
SEVERAL = 10  # one record in so many has a second image, which the record before has, too


def duplicates(bench: Bench) -> None:
    """Contents (samples of which a tenth repeat), ids, and groups by image, each in a process of its own."""
    sizes = [size // (100 if bench.quick else 1) for size in SIZES]
    works = {"contents counted": "contents", "ids looked up": "ids", "groups joined and split": "groups"}
    for work, function in works.items():
        found = {}
        for samples in sizes:
            bench.at(f"{samples:,} samples: {work}")
            one = found[samples] = bench.call(f"{__name__}:{function}", {"samples": samples})
            data = f"{samples:,} samples"
            bench.report.figure(f"{work}: CPU time", data, "us a sample", Side(work, [1e6 * one["cpu_s"] / samples]))
            bench.report.figure(f"{work}: peak memory", data, "MiB", Side(work, [one["mib"]]))
            bench.report.figure(f"{work}: on disk", data, "bytes a sample", Side(work, [one["disk_bytes"] / samples]))
        for few, many in itertools.pairwise(sizes):
            grown = (found[many]["mib"] - found[few]["mib"]) * MIB / (many - few)
            between = f"{few:,} to {many:,} samples"
            bench.report.figure(f"{work}: slope of memory", between, "bytes a sample", Side(work, [grown]))


def _measured(work: Callable[[], None], disk_bytes: Callable[[], int]) -> dict[str, float]:
    before, cpu_s = _peak_mib(), time.process_time()
    work()
    used_s = time.process_time() - cpu_s
    return {"cpu_s": used_s, "mib": max(0.0, _peak_mib() - before), "disk_bytes": disk_bytes()}


def _table_bytes(table: sqlite3.Connection) -> int:
    pages, page_bytes = (table.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return int(pages * page_bytes)


def _peak_mib() -> float:
    return max(private_mib(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def contents(samples: int) -> dict[str, float]:
    counts, random = ContentCounts(), np.random.default_rng(0)

    def count() -> None:
        for start in range(0, samples, AT_ONCE):
            digests = random.integers(0, 256, (min(AT_ONCE, samples - start), DIGEST_BYTES), dtype=np.uint8)
            digests[::SEVERAL] = digests[0]  # an image that very many samples have
            counts.add(digests, random.random(len(digests)) < 0.9)
        assert counts.totals().repeats

    return _measured(count, lambda: samples * ROW.itemsize)


def ids(samples: int) -> dict[str, float]:
    seen = SeenIds()

    def look_up() -> None:
        for number in range(samples):
            seen.add(f"r{number}", stable_digest(number))

    return _measured(look_up, lambda: _table_bytes(seen._table))


def groups(samples: int) -> dict[str, float]:
    found = SampleGroups(DataConfig(source="unused.json", sequence_length=128))

    def split() -> None:
        for number in range(1, samples + 1):
            found.add(number, (f"{number - 1} a", f"{number} a") if number % SEVERAL == 0 else (f"{number} a",))
        found.join()
        for number in range(1, samples + 1):
            found.split_of(number, f"{number - (number % SEVERAL == 0)} a")
        found.check(str, lambda number: f"{number} a")

    tables = (found._images._table, found._several)
    return _measured(split, lambda: samples * ROW.itemsize + sum(map(_table_bytes, tables)))
