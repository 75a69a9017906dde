"""Part `disk-offload`: optimizer state on a disk (`train.nvme_path`) beside the same in memory: a step's time, memory,
and what happens where memory has no room for it.

The last needs the right to make a memory control group (root, on Linux); without it that figure is left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.tiny_run import TinyRun
from tests.support.trainer.memory_cases import Case
from vlmpipe.trainer.distributed.process import start_worker

MIB = 1 << 20
WIDTH, STEPS = {"whole": 2048, "quick": 896}, {"whole": 6, "quick": 3}  # of some 150 and 30 million parameters
LANGUAGE = "model.language_model.config"
HEADROOM = 0.6  # of what is on the disk: memory for its pages, beside what the run on the disk has of its own
SAMPLE_S = 0.01
PLACES = {"disk": "state on the disk", "memory": "state in memory"}
CGROUPS = Path("/sys/fs/cgroup")
# Before anything is imported: what a process has taken already is not counted to the group.
IN_GROUP = """
import os, pathlib, runpy, sys
pathlib.Path(sys.argv.pop(1), "cgroup.procs").write_text(str(os.getpid()))
runpy.run_module("benchmarks.support.processes", run_name="__main__", alter_sys=True)
"""


def disk_offload(bench: Bench) -> None:
    """Each in a process of its own, without and then with too little memory."""
    both = {place: trained(bench, place) or {} for place in PLACES}
    disk, memory = both.values()
    report, data = bench.report, f"{memory['parameters'] / 1e6:.0f} million trained parameters"
    law = "the losses are the same with optimizer state on a disk and in memory"
    report.require(disk["losses"] == memory["losses"], law)
    sides = [Side(PLACES[place], [1 / one_s for one_s in found["steps_s"]]) for place, found in both.items()]
    report.compare("step: state on the disk or in memory", data, "1 / s", *sides)
    report.note("State on a disk: the sides are processes of their own, one after the other, whose steps are rounds.")
    for place, found in both.items():
        report.figure("own memory at most", data, "MiB", Side(PLACES[place], [found["own_bytes"] / MIB]))
    report.figure("optimizer state on the disk", data, "MiB", Side(PLACES["disk"], [disk["on_disk_bytes"] / MIB]))
    # Between the two: the file's pages count, but the system lets go of them.
    limit_bytes = int(disk["own_bytes"] + HEADROOM * disk["on_disk_bytes"])
    with limited(limit_bytes) as group:
        if not group:
            report.note("With little memory: not tried, this process may make no control group.")
            return
        tight = {place: trained(bench, place, group) for place in PLACES}
    if tight["disk"]:
        report.require(tight["disk"]["losses"] == memory["losses"], law)
    report.answer(f"{limit_bytes / MIB:,.0f} MiB of memory in all", ended(tight["disk"]), ended(tight["memory"]))


def ended(found: dict[str, Any] | None) -> str:
    return f"trains, {statistics.median(found['steps_s']):.2f} s a step" if found else "killed by the system"


def trained(bench: Bench, place: str, group: Path | None = None) -> dict[str, Any] | None:
    """What a process of its own found; None where the system killed it for its memory."""
    bench.at(PLACES[place] + (", with too little memory" if group else ""))
    folder = str(bench.scratch / "state") if place == "disk" else ""
    arguments = {"folder": folder, "quick": bench.quick}
    started_by = ("-c", IN_GROUP, str(group)) if group else ()
    try:
        found: dict[str, Any] = bench.call(f"{__name__}:train", arguments, started_by=started_by)
    except subprocess.CalledProcessError as error:
        if group and error.returncode == -9:
            return None
        raise
    return found


def train(folder: str, quick: bool) -> dict[str, Any]:
    """ZeRO-2 on one process: all state is its own, and in `folder` where one is given."""
    form = "quick" if quick else "whole"
    sizes = {"hidden_size": WIDTH[form], "intermediate_size": 3 * WIDTH[form], "num_hidden_layers": 3}
    changes: dict[str, Any] = {f"{LANGUAGE}.{name}": value for name, value in sizes.items()}
    changes["train.offload"] = "optimizer"
    if folder:
        changes["train.nvme_path"] = folder
    run, peak = TinyRun(Case("zero2", changes, passes=1), start_worker()), MemoryPeak()
    strategy: Any = run.strategy
    losses, steps_s = [], []
    for _ in range(STEPS[form]):
        started_s = time.perf_counter()
        losses.append(float(run.step()))
        steps_s.append(time.perf_counter() - started_s)
    return {
        "parameters": sum(each.numel() for each in strategy._engine.module.parameters() if each.requires_grad),
        "losses": losses,
        "steps_s": steps_s,
        "on_disk_bytes": strategy._disk.held_bytes() if strategy._disk else 0,
        "own_bytes": peak.stop(),
    }


class MemoryPeak(threading.Thread):
    """Samples how much memory this process has of its own."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._peak_bytes, self._over = 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._peak_bytes = max(self._peak_bytes, own_bytes())

    def stop(self) -> int:
        """The largest sample."""
        self._over.set()
        self.join()
        return self._peak_bytes


def own_bytes() -> int:
    """Of this process's memory, without pages of files."""
    match = re.search(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    return 1024 * int(match[1])


@contextlib.contextmanager
def limited(limit_bytes: int, cgroups: Path = CGROUPS) -> Iterator[Path | None]:
    """A control group of so much memory, files' pages included; None where this process can make none."""
    version_1 = cgroups / "memory"
    root, limit = (version_1, "memory.limit_in_bytes") if version_1.is_dir() else (cgroups, "memory.max")
    group = root / f"vlmpipe-bench-{os.getpid()}"
    made = _make(group, limit, limit_bytes)
    try:
        yield group if made else None
    finally:
        if group.is_dir():
            group.rmdir()


def _make(group: Path, limit: str, limit_bytes: int) -> bool:
    try:
        group.mkdir()
        Path(group, limit).write_text(str(limit_bytes), encoding="utf-8")
    except OSError:  # no right to, no control groups, read-only ones, none that are given memory here
        return False
    return True
