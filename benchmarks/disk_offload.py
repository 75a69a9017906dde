"""Optimizer state on a disk (`train.nvme_path`) beside the same in memory: a step's time, memory, what happens where
memory has no room for it. `python -m benchmarks.disk_offload`

The last needs the right to make a memory control group (root, on Linux); without it that part is left out, and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.trainer.measure_memory import packed_batch
from tests.support.trainer.memory_cases import Case
from trainer.distributed.process import start_worker
from trainer.models.registry import family_of
from trainer.strategies.registry import build_strategy

MIB = 1 << 20
WIDTH, STEPS = {"whole": 2048, "quick": 896}, {"whole": 6, "quick": 3}  # of some 150 and 30 million parameters
SIZE = "model.language_model.config"
HEADROOM = 0.6  # of what lies on the disk: memory for its pages, beside what the run on the disk has of its own
LOOK_S = 0.01
PLACES = ("memory", "disk")
CGROUPS = Path("/sys/fs/cgroup")
# Before anything is imported, for what a process has taken already is not the group's.
IN_GROUP = """
import os, pathlib, runpy, sys
pathlib.Path(sys.argv.pop(1), "cgroup.procs").write_text(str(os.getpid()))
runpy.run_module("benchmarks.disk_offload", run_name="__main__", alter_sys=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short form that shows that it works; not for figures")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/vlmpipe-bench"), help="on the disk to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--place", choices=PLACES, help=argparse.SUPPRESS)  # of a process that trains
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.place:
        train(chosen)
        return 0
    found: dict[str, Any] = {place: trained(chosen, place) for place in PLACES}
    memory, disk = (found[place] for place in PLACES)
    # Between the two: the file's pages count, but the system lets go of them.
    limit_bytes = int(disk["own_bytes"] + HEADROOM * disk["on_disk_bytes"])
    with limited(limit_bytes) as group:
        if group:
            found["limit_bytes"] = limit_bytes
            found["limited"] = {place: trained(chosen, place, group) for place in PLACES}
    report(found)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    same = memory["losses"] == disk["losses"]
    if limits := found.get("limited"):
        same = same and limits["disk"] is not None and limits["disk"]["losses"] == memory["losses"]
    return 0 if same else 1


def trained(chosen: argparse.Namespace, place: str, group: Path | None = None) -> dict[str, Any] | None:
    """What a process of its own found; None where the system killed it for its memory."""
    with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-") as scratch:
        output = Path(scratch, "found.json")
        how = ["-c", IN_GROUP, str(group)] if group else ["-m", "benchmarks.disk_offload"]
        command = [sys.executable, "-W", "ignore", *how, "--place", place, "--output", str(output)]
        command += ["--folder", str(chosen.folder), *["--quick"] * chosen.quick]
        environment = os.environ | {"LOCAL_RANK": "0"}  # DeepSpeed asks for it
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if group and done.returncode == -9:
            return None
        if done.returncode != 0:
            raise SystemExit(f"training with its state in {place} failed:\n{done.stdout}{done.stderr}")
        return dict(json.loads(output.read_text()))


def train(chosen: argparse.Namespace) -> None:
    """ZeRO-2 on one process: all state is its own."""
    form = "quick" if chosen.quick else "whole"
    width = WIDTH[form]
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 3}
    changes: dict[str, Any] = {f"{SIZE}.{name}": value for name, value in sizes.items()} | {
        "train.offload": "optimizer"
    }
    if chosen.place == "disk":
        changes["train.nvme_path"] = str(chosen.folder)
    case, worker = Case("zero2", changes, passes=1), start_worker()
    job = case.config(1)
    family = family_of(job.model)
    model = family.skeleton(job.model, vocabulary=case.vocabulary)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02, generator=generator)
    module = family.training_module(job.model, model, cached=True).train()
    parameters = sum(each.numel() for each in module.parameters() if each.requires_grad)
    strategy: Any = build_strategy(job.train, module, family.blocks(module), worker)
    batch = packed_batch(job.model, case.rows, case.vocabulary, cached=True)
    losses, steps_s, most = [], [], Most()
    for _ in range(STEPS[form]):
        started_s = time.perf_counter()
        loss = strategy.forward_backward([batch], len(batch.label_ids))
        strategy.step(1.0)
        steps_s.append(time.perf_counter() - started_s)
        losses.append(float(loss))
    found = {
        "parameters": parameters,
        "losses": losses,
        "step_s": statistics.median(steps_s),
        "on_disk_bytes": strategy._disk.held_bytes() if strategy._disk else 0,
        "own_bytes": most.stop(),
        "file_bytes": of_process("RssFile"),
    }
    chosen.output.write_text(json.dumps(found))


class Most(threading.Thread):
    """Looks again and again how much memory this process has of its own."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._seen, self._over = 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(LOOK_S):
            self._seen = max(self._seen, of_process("RssAnon"))

    def stop(self) -> int:
        """The most bytes that were seen."""
        self._over.set()
        self.join()
        return self._seen


def of_process(kind: str) -> int:
    """Bytes of this process's memory of that kind: RssAnon is its own, RssFile pages of files."""
    match = re.search(rf"^{kind}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
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
        Path(group, limit).write_text(str(limit_bytes))
    except OSError:  # no right to, no control groups, read-only ones, none that are given memory here
        return False
    return True


def report(found: dict[str, Any]) -> None:
    memory, disk = (found[place] for place in PLACES)
    print(f"ZeRO-2 in fp32, one process, {memory['parameters'] / 1e6:.0f} million trained parameters.\n")
    for place, one in zip(PLACES, (memory, disk), strict=True):
        print(
            f"state in {place}: {1000 * one['step_s']:.0f} ms a step, {one['own_bytes'] / MIB:,.0f} MiB of its own "
            f"memory, {one['on_disk_bytes'] / MIB:,.0f} MiB on the disk; {one['file_bytes'] / MIB:,.0f} MiB of files, "
            "libraries among them, are in memory too"
        )
    print(
        f"\nlosses of {len(memory['losses'])} steps: {'the same' if memory['losses'] == disk['losses'] else 'OTHERS'}"
    )
    print(f"time of a step, disk over memory: {disk['step_s'] / memory['step_s']:.2f}")
    if "limited" not in found:
        print("with little memory: not tried, for this process may make no control group")
        return
    print(f"\nwith {found['limit_bytes'] / MIB:,.0f} MiB of memory in all:")
    for place, one in found["limited"].items():
        if one is None:
            print(f"state in {place}: killed by the system")
            continue
        same = "the same losses" if one["losses"] == memory["losses"] else "OTHER losses"
        print(f"state in {place}: {1000 * one['step_s']:.0f} ms a step, {same}")


if __name__ == "__main__":
    sys.exit(main())
