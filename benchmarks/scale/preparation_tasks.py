"""Part `preparation-tasks`: preparation of many small records over several tasks, as a cluster runs them.

Each step is a process of its own, as a task of the pipeline is: one plans, some prepare shares of the chunks, two at
once on this machine, and one merges. What a stopped benchmark has measured stays beside its data, and the next one with
the same folder goes on from there: 10 million records take hours.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.scale.made_chunks import answer, question
from benchmarks.scale.private_memory import MIB, Memory, PeakMemory
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import Clock
from benchmarks.support.workloads import job_of
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.prepare.pipeline import plan_chunks, prepare, prepare_share
from vlmpipe.trainer.progress import Progress

SIZES = (100_000, 1_000_000, 10_000_000)  # or `--size` and a hundredth and a tenth of it
TASKS, AT_ONCE = 8, 2
QUARTERS = 4  # of a task, whose first and last are compared
FILE_RECORDS = 50_000
STEPS = {"plan": "plan-data", "share": "a task of prepare-chunks", "merge": "prepare-data"}
WATCH_S = {"plan": 0.5, "share": 0.5, "merge": 0.1}  # between two looks at the memory; a merge has short peaks


def preparation_tasks(bench: Bench) -> None:
    """Memory and CPU time of each step by the number of records: texts, which are the smallest records."""
    sizes = sizes_of(bench)
    found: dict[int, dict[str, dict[str, float]]] = {}
    for number, records in enumerate(sizes):
        folder = bench.scratch.parent / f"vlmpipe-preparation-{records}"
        if not (folder / "set").is_dir():
            write_texts(folder / "writing", records)
            (folder / "writing").rename(folder / "set")
        arguments: dict[str, Any] = {"folder": str(folder), "records": records}
        bench.at(f"{records:,} records: plan", number / len(sizes))
        plan = bench.call(f"{__name__}:measured", arguments | {"step": "plan"})
        arguments["fingerprint"] = plan["fingerprint"]
        bench.at(f"{records:,} records: {TASKS} tasks", (number + 0.3) / len(sizes))
        shares = _shares(bench, arguments)
        bench.at(f"{records:,} records: merge", (number + 0.8) / len(sizes))
        merge = bench.call(f"{__name__}:measured", arguments | {"step": "merge"})
        bench.report.require(merge["accepted"] == records, "every record is accepted")
        whole = [one for one in shares if one["whole"]]
        bench.report.require(len(whole) > 0, "a task was measured from its first record to its last")
        of_all = sum(one["cpu_s"] for one in whole) * TASKS / len(whole)  # tasks have equal shares
        share = {name: max(one[name] for one in shares) for name in ("mib", "mapped_mib")} | {"cpu_s": of_all}
        found[records] = {"plan": plan, "share": share, "merge": merge}
        data = f"{records:,} texts, {TASKS} tasks"
        for step, figures in found[records].items():
            report_step(bench, step, data, figures, records)
        paces = [one["last_s"] / one["first_s"] for one in whole if one["last_s"]]
        if paces:
            pace = statistics.median(paces)
            claim = "a task's last quarter of records beside its first: CPU time"
            bench.report.figure(claim, data, "times", Side("share", [pace]))
        bench.at(f"{records:,} records: done", (number + 1) / len(sizes))
        shutil.rmtree(folder)
    for step in STEPS:
        report_slopes(bench, step, {records: steps[step] for records, steps in found.items()})


def sizes_of(bench: Bench) -> list[int]:
    """Numbers of records that are measured."""
    return [size * (bench.size or SIZES[-1]) // SIZES[-1] // (100 if bench.quick else 1) for size in SIZES]


def report_step(bench: Bench, step: str, data: str, figures: dict[str, float], records: int) -> None:
    """Report the memory and the CPU time of a step."""
    for claim, unit, value in (
        ("memory", "MiB", figures["mib"]),
        ("pages of mapped files", "MiB", figures["mapped_mib"]),
        ("CPU time of all", "us a record", 1e6 * figures["cpu_s"] / records),
    ):
        bench.report.figure(f"{STEPS[step]}: {claim}", data, unit, Side(step, [value]))


def report_slopes(bench: Bench, step: str, found: dict[int, dict[str, float]]) -> None:
    """Report what each further record adds to a step's memory. found: its figures by the number of records."""
    for few, many in itertools.pairwise(found):
        grown = (found[many]["mib"] - found[few]["mib"]) * MIB / (many - few)
        between = f"{few:,} to {many:,} texts"
        bench.report.figure(f"{STEPS[step]}: slope of memory", between, "bytes a record", Side(step, [grown]))


def _shares(bench: Bench, arguments: dict[str, Any]) -> list[dict[str, float]]:
    def share(task: int) -> dict[str, float]:
        found: dict[str, float] = bench.call(f"{__name__}:measured", arguments | {"step": "share", "task": task})
        return found

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(share, range(TASKS)))


def write_texts(folder: Path, records: int) -> None:
    """Parquet files of short questions and answers."""
    folder.mkdir(parents=True)
    for start in range(0, records, FILE_RECORDS):
        numbers = range(start, min(records, start + FILE_RECORDS))
        columns = {
            "id": [f"r{number}" for number in numbers],
            "question": list(map(question, numbers)),
            "answer": list(map(answer, numbers)),
        }
        pq.write_table(pa.table(columns), folder / f"part-{start // FILE_RECORDS:05d}.parquet")


def measured(folder: str, records: int, step: str, fingerprint: str = "", task: int = 0) -> dict[str, Any]:
    """Run a step, or read what an earlier benchmark measured of it.

    Returns its CPU time, and the most memory, own and of mapped files, beyond what the process had before. `whole` is
    false of a step that was stopped once: what it had made is not made again.
    """
    kept, begun = Path(folder, f"{step}-{task}.json"), Path(folder, f"{step}-{task}.begun")
    if kept.is_file():
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    whole = not begun.exists()
    begun.touch()
    job = job_in(Path(folder))
    progress = _Quarters(job.run.run_uri, f"{step}-{task}", quiet=True)
    before, clock, peak = Memory.now(), Clock(), PeakMemory(WATCH_S[step])
    accepted = 0
    if step == "plan":
        fingerprint = plan_chunks(job, progress).fingerprint
    elif step == "share":
        prepare_share(job, fingerprint, task, TASKS, progress)
    else:
        accepted = prepare(job, progress).counts["accepted"]
    used = clock.stop(records)
    first_s, last_s = progress.first_and_last()
    most = peak.stop()
    memory = {"mib": most.own_mib - before.own_mib, "mapped_mib": most.mapped_mib - before.mapped_mib}
    figures = memory | {"cpu_s": used.cpu_per_unit * records, "first_s": first_s, "last_s": last_s}
    measured_step = figures | {"accepted": accepted, "fingerprint": fingerprint, "whole": whole}
    kept.write_text(json.dumps(measured_step), encoding="utf-8")
    return measured_step


def job_in(folder: Path) -> JobConfig:
    """The job that prepares the texts in `folder`/set."""
    source = (f"data.source={folder / 'set'}", "data.image_folder=", f"data.tasks={TASKS}", "data.workers=1")
    return job_of("llava-local", folder / "root", "texts", source)


class _Quarters(Progress):
    """Notes the CPU time at which each quarter of a step's records begins and ends."""

    def __init__(self, run_uri: str, step: str, *, quiet: bool) -> None:
        super().__init__(run_uri, step, quiet=quiet)
        self._reached_s: list[float] = []

    def update(self, done: float, total: float = 0, *, unit: str = "", message: str = "", **detail: Any) -> None:
        super().update(done, total, unit=unit, message=message, **detail)
        if total and done * QUARTERS >= len(self._reached_s) * total:
            self._reached_s.append(time.process_time())

    def first_and_last(self) -> tuple[float, float]:
        """CPU time of the first and of the last quarter; 0 of a step that was not counted to its end."""
        reached = self._reached_s
        return (reached[1] - reached[0], reached[-1] - reached[-2]) if len(reached) == QUARTERS + 1 else (0.0, 0.0)
