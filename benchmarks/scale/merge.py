"""Part `merge`: memory and CPU time of `prepare-data` by the number of records, in minutes.

Its chunks are made without preparing their records (`made_chunks`); `preparation-tasks` prepares them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.scale.made_chunks import make_chunks
from benchmarks.scale.preparation_tasks import job_in, report_slopes, report_step, sizes_of, write_texts
from benchmarks.support.suite import Bench

SOURCE_RECORDS = 1_000  # of the source, which is not read: all its chunks are prepared


def merge(bench: Bench) -> None:
    """Each size in processes of its own: one makes the chunks, one merges them."""
    sizes = sizes_of(bench)
    found: dict[int, dict[str, float]] = {}
    for number, records in enumerate(sizes):
        folder = bench.scratch / str(records)
        bench.at(f"{records:,} records: making chunks", number / len(sizes))
        bench.call(f"{__name__}:made", {"folder": str(folder), "records": records})
        bench.at(f"{records:,} records: merge", (number + 0.5) / len(sizes))
        arguments = {"folder": str(folder), "records": records, "step": "merge"}
        found[records] = bench.call("benchmarks.scale.preparation_tasks:measured", arguments)
        bench.report.require(found[records]["accepted"] == records, "every record is in the merged set")
        report_step(bench, "merge", f"{records:,} texts, made chunks", found[records], records)
        shutil.rmtree(folder)
    report_slopes(bench, "merge", found)


def made(folder: str, records: int) -> None:
    """Make the chunks of a source with one small file in `folder`/set."""
    write_texts(Path(folder, "set"), min(records, SOURCE_RECORDS))
    make_chunks(job_in(Path(folder)), records)
