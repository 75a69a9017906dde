"""Parts `preparation` and `preparation-scale`: CPU time of a sample, two processes or one, and a million records."""

from __future__ import annotations

import resource
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.data.tiny_records import write_tars
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import Clock, Measured, clocked
from benchmarks.support.workloads import data_workloads, job_of, prepare_job
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.sample import SPLITS
from vlmpipe.trainer.data.shards.index import Index

RECORDS, CHUNKS = 20_000, 8  # prepared by two processes and by one
MILLION = 1_000_000
TINY_PICTURES = "tars of tiny pictures"


def preparation(bench: Bench) -> None:
    """Check, tokenize, count and store, the training of the tokenizer included."""
    loads = data_workloads(bench)
    bench.expect(len(loads) + (not bench.quick))
    for load in loads:
        root, samples = bench.scratch / "again", load.online.data.max_samples
        job = job_of(load.run_file, root, "prepare", (f"data.max_samples={samples}",))
        found = bench.take_turns(load.name, {"ours": partial(prepared, job, root)}, warm_up=False)
        values = [1e3 * each.cpu_per_unit for each in found["ours"]]
        bench.report.figure("preparation", load.name, "CPU ms / sample", Side("prepare_data", values))
    if not bench.quick:
        processes(bench)


def processes(bench: Bench) -> None:
    """Many small records, in chunks of which a process takes whole ones; to start the second process is part of it.

    It is wall time that two processes save: other work on the machine shows at once.
    """
    root = bench.scratch / "processes"
    root.mkdir()
    write_tars(root / "set", RECORDS)
    sides = {name: partial(_tiny_pictures, root, workers) for name, workers in (("two", 2), ("one", 1))}
    found = bench.take_turns("two processes or one", sides, warm_up=False)
    two, one = ([1 / each.wall_per_unit for each in found[name]] for name in sides)
    pair = Side("two processes", two), Side("one process", one)
    bench.report.compare("preparation: two processes or one", f"{RECORDS:,} tiny pictures", "samples / s", *pair)


def _tiny_pictures(root: Path, workers: int) -> Measured:
    chunks = (f"data.chunk_samples={RECORDS // CHUNKS}", f"data.workers={workers}")
    return prepared(tiny_job(root / "set", root / "prepared", *chunks), root / "prepared")


def tiny_job(source: Path, root: Path, *overrides: str) -> JobConfig:
    return job_of("llava-local", root, "tiny", (f"data.source={source}", "data.image_folder=", *overrides))


def prepared(job: JobConfig, root: Path) -> Measured:
    """Prepare under `root` and remove it. Units: samples."""

    def work() -> float:
        index = Index.load(prepare_job(job))
        return sum(len(index.split(name)) for name in SPLITS)

    measured = clocked(work)
    shutil.rmtree(root)
    return measured


def preparation_scale(bench: Bench) -> None:
    """A million records beside a fiftieth of them: does time grow in line, and does memory stay?

    Each size in one process of its own (data.workers=1), since the peak of a process's memory never comes down.
    """
    many = RECORDS if bench.quick else MILLION
    few = max(many // 50, 2000)
    found = {}
    for number, count in enumerate((few, many)):
        bench.at(f"{count:,} records", number / 2)
        folder = bench.scratch / str(count)
        write_tars(folder / "set", count)
        found[count] = bench.call(f"{__name__}:measured", {"folder": str(folder), "records": count})
        bench.report.require(found[count]["accepted"] == count, "every record is accepted")
        shutil.rmtree(folder)
    for claim, unit, name in (
        ("records prepared in a CPU second", "records", "per_cpu_s"),
        ("records prepared in a second", "records", "per_s"),
        ("peak memory (a ratio of 1: it does not grow)", "MiB", "peak_mib"),
    ):
        sides = [Side(f"{count:,} records", [found[count][name]]) for count in (many, few)]
        bench.report.compare(claim, TINY_PICTURES, unit, *sides)


def measured(folder: str, records: int) -> dict[str, Any]:
    """Prepare what is in `folder`, in this process."""
    job = tiny_job(Path(folder, "set"), Path(folder, "root"), "data.workers=1")
    clock = Clock()
    index = Index.load(prepare_job(job))
    used = clock.stop(records)
    return {
        "accepted": sum(len(index.split(name)) for name in SPLITS),
        "per_cpu_s": 1 / used.cpu_per_unit,
        "per_s": 1 / used.wall_per_unit,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,  # Linux counts in KiB
    }
