"""Parts `mixture` and `mixture-scale`: what several sources add to preparation; ten of them with a million records."""

from __future__ import annotations

import resource
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.data.preparation import prepared
from benchmarks.data.tiny_records import text
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import Clock
from benchmarks.support.workloads import job_of, prepare_job
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.mixture import Mixture
from vlmpipe.trainer.data.prepare.fingerprint import find_prepared
from vlmpipe.trainer.data.sample import SPLITS
from vlmpipe.trainer.data.shards.index import Index

SOURCES, RECORDS = 10, 10_000
MILLION = 1_000_000
TEXTS = "ten sources of short texts"
LINE = '{{"id": "{0}", "conversations": [{{"from": "human", "value": "{0}"}}, {{"from": "gpt", "value": "{1}"}}]}}\n'


def mixture(bench: Bench) -> None:
    """The same records as ten sources and as a single one, in as many chunks, with the same tokenizer."""
    records = RECORDS // (10 if bench.quick else 1)
    folder = bench.scratch / "mixture"
    write_sources(folder, records)
    chunk = records // SOURCES  # a source of the ten is too small to be cut
    jobs = {
        "ten": _ten(folder, f"data.chunk_samples={2 * chunk}"),
        "one": _job(folder, f"data.source={folder}/all.jsonl", f"data.chunk_samples={chunk}"),
    }
    sides = {name: partial(prepared, job, folder / "root") for name, job in jobs.items()}
    found = bench.take_turns("ten sources or one", sides, warm_up=False)
    units = {measured.units for side in found.values() for measured in side}
    bench.report.require(units == {records}, "each side accepts every record", found=str(units))
    ten, one = ([1 / each.cpu_per_unit for each in found[name]] for name in sides)
    bench.report.compare(
        "preparation: ten sources or one", f"{records:,} short texts", "records per CPU second",
        Side("ten sources", ten), Side("one source", one),
    )  # fmt: skip


def mixture_scale(bench: Bench) -> None:
    """A million records in ten sources beside a fiftieth of them: does time grow in line, and does memory stay?

    Each size is prepared in one process of its own, and an epoch of the mixture is drawn there.
    """
    many = RECORDS if bench.quick else MILLION
    few = many // 50
    found = {}
    for number, count in enumerate((few, many)):
        bench.at(f"{count:,} records", number / 2)
        folder = bench.scratch / str(count)
        write_sources(folder, count)
        found[count] = bench.call(f"{__name__}:measured", {"folder": str(folder), "records": count})
        bench.report.require(found[count]["accepted"] == count, "every record is accepted")
        shutil.rmtree(folder)
    for claim, unit, name in (
        ("records prepared in a CPU second", "records", "per_cpu_s"),
        ("records prepared in a second", "records", "per_s"),
        ("peak memory (a ratio of 1: it does not grow)", "MiB", "peak_mib"),
        ("samples of an epoch's order in a CPU second", "samples", "drawn_per_cpu_s"),
    ):
        sides = [Side(f"{count:,} records", [found[count][name]]) for count in (many, few)]
        bench.report.compare(claim, TEXTS, unit, *sides)


def measured(folder: str, records: int) -> dict[str, Any]:
    """Prepare what is in `folder` and draw an epoch, in this process."""
    job = _ten(Path(folder))
    clock = Clock()
    prepare_job(job)
    used = clock.stop(records)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB
    index = Index.load(find_prepared(job))
    clock = Clock()
    drawn = Mixture(index.split("train"), job.data, seed=0).drawn(0)
    drawing = clock.stop(len(drawn))
    return {
        "accepted": sum(len(index.split(name)) for name in SPLITS),
        "per_cpu_s": 1 / used.cpu_per_unit,
        "per_s": 1 / used.wall_per_unit,
        "peak_mib": peak_mib,
        "drawn_per_cpu_s": 1 / drawing.cpu_per_unit,
    }


def write_sources(folder: Path, records: int) -> None:
    """Ten files of as many records each, and all of them in one file."""
    folder.mkdir()
    with (folder / "all.jsonl").open("w", encoding="utf-8") as every:
        for source in range(SOURCES):
            first, behind = source * records // SOURCES, (source + 1) * records // SOURCES
            lines = [LINE.format(number, text(number)) for number in range(first, behind)]
            (folder / f"{source}.jsonl").write_text("".join(lines), encoding="utf-8")
            every.writelines(lines)


def _ten(folder: Path, *overrides: str) -> JobConfig:
    """Weights from 1 to 10."""
    sources = [f"{{name: s{n}, uri: {folder}/{n}.jsonl, weight: {n + 1}}}" for n in range(SOURCES)]
    return _job(folder, f"data.sources=[{', '.join(sources)}]", "data.source=", *overrides)


def _job(folder: Path, *overrides: str) -> JobConfig:
    fixed = ("data.image_folder=", "data.workers=1", "model.tokenizer=train:500")
    return job_of("llava-local", folder / "root", "texts", (*fixed, *overrides))
