"""Part `many-runs`: what the commands about runs take where an output folder has 100, 1,000 and 10,000 of them.

One real run is trained; the others are copies of its folder with other names, times and outcomes
(`benchmarks/planner/runs_root.py`). Every command is a process of its own. A registry of as many versions is measured
beside them, in this process.

To compare with an earlier commit, check it out: git worktree add build/earlier COMMIT. With the most runs, its commands
then take turns with those of this checkout. Modules of both are compiled first, as those of an installed package are.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.planner.runs_root import write_runs
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.registry.claims import Claims
from vlmpipe.registry.folder import Candidate, FolderRegistry
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import seal

ROOT = Path(__file__).parents[2]
EARLIER = ROOT / "build/earlier"
PACKAGES = ("vlmpipe", "trainer", "pipelines", "components")
Seconds = tuple[float, float]  # CPU, wall
COUNTS = (100, 1_000, 10_000)
COMMAND = [sys.executable, "-m", "vlmpipe.cli.app"]
RUN_FILE, STEPS = str(ROOT / "configs/digits.yaml"), "train.max_steps=20"
COMMANDS = {  # {first}: the oldest run
    "status": ("status",),
    "status of a run file's newest": ("status", "@last:digits-03"),
    "diagnose": ("diagnose", "@last"),
    "compare": ("compare", "@last", "{first}"),
    "runs list": ("runs", "list"),
    "runs list with a filter": ("runs", "list", "--tag", "baseline"),
    "runs page": ("runs", "page", "--output", "{page}"),
    "runs tag": ("runs", "tag", "@last", "seen"),
    "runs prune --dry-run": ("runs", "prune", "--keep", "5", "--dry-run"),
    "runs rm --dry-run": ("runs", "rm", "{first}", "--unfinished", "--dry-run"),
}


def many_runs(bench: Bench) -> None:
    """CPU and wall seconds of each command, and calls to the storage for a version."""
    original = _trained(bench.scratch / "trained")
    counts = [count // 10 for count in COUNTS] if bench.quick else COUNTS
    bench.expect(len(counts) + 1)
    for count in counts:
        root = bench.scratch / f"runs-{count}"
        first = write_runs(original, root, count)[0]
        names = {"{first}": first, "{page}": str(bench.scratch / "page.html")}
        checkouts = {"": ROOT}
        if EARLIER.is_dir() and count == counts[-1]:
            checkouts[", earlier commit"] = EARLIER
        for checkout in checkouts.values():
            subprocess.run([sys.executable, "-m", "compileall", "-q", *PACKAGES], cwd=checkout, check=True)
        sides: dict[str, Callable[[], Seconds]] = {
            title + which: partial(
                _seconds, [*(names.get(word, word) for word in words), "--root", str(root)], checkout
            )
            for title, words in COMMANDS.items()
            for which, checkout in checkouts.items()
        }
        found = bench.take_turns(f"{count:,} runs", sides, warm_up=False)
        for title in COMMANDS:
            _report(bench, title, f"{count:,} runs", {title + which: found[title + which] for which in checkouts})
    _versions(bench, original, counts[-1])


def _report(bench: Bench, title: str, data: str, found: dict[str, list[Seconds]]) -> None:
    """Figures of this checkout, then of an earlier one, and how many times as many commands this one runs a second."""
    claim = f"vlmpipe {title}"
    for label, values in found.items():
        for unit, place in (("CPU s", 0), ("s", 1)):
            bench.report.figure(claim, data, unit, Side(label, [pair[place] for pair in values]))
    if len(found) > 1:
        ours, earlier = (Side(label, [1 / cpu_s for cpu_s, _ in values]) for label, values in found.items())
        pairs = zip(*found.values(), strict=True)
        wall_ratio = median(before[1] / now[1] for now, before in pairs)
        bench.report.compare(claim, data, "commands / CPU s", ours, earlier, wall_ratio=wall_ratio)


def _trained(root: Path) -> Path:
    """The folder of a real run that has ended."""
    command = [*COMMAND, "run", RUN_FILE, STEPS, f"output.root_uri={root}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (folder,) = (root / "runs").iterdir()
    return folder


def _seconds(words: list[str], checkout: Path) -> Seconds:
    """CPU and wall seconds of a command."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    # A run whose gate rejected its model, or that was stopped, ends some of these with a code of its own.
    subprocess.run([*COMMAND, *words], cwd=checkout, check=True, stdout=subprocess.DEVNULL)
    took_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, took_s


class Counting(LocalStorage):
    """Counts its calls: of a bucket each is a request, and a list one for 1,000 names."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.calls = Counter[str]()

    def __getattribute__(self, name: str) -> Any:
        if name in ("list", "stat", "read", "create"):
            self.calls[name] += 1
        return super().__getattribute__(name)


def _versions(bench: Bench, original: Path, count: int) -> None:
    """Publishing a version and asking for the champion, with `count` versions of other runs."""
    root = bench.scratch / "registry"
    registry = FolderRegistry(str(root))
    candidate = Candidate(run_id="first", export_uri=str(original / "export"), metrics={})
    entry = registry.register("model", candidate, "# card")
    registry.promote("model", entry.version, instead_of=None)
    names = root / "model/claims"
    for number in range(2, count + 1):
        (names / f"{number:06d}-run-{number}-{'0' * 16}").touch()
        (root / f"model/versions/{number:06d}").mkdir()
        claim = seal({"run_id": f"run-{number}", "checkpoint": "c"})
        (root / f"model/versions/{number:06d}/CLAIM").write_bytes(claim)
    store = Counting(root)
    claims = Claims(store, "model")
    numbers = iter(range(count + 1, count + 1_000))
    sides = {
        "taking a number": lambda: _timed(lambda: claims.take(f"new-{next(numbers)}", "c")),
        "champion": lambda: _timed(lambda: registry.champion("model")),
    }
    found = bench.take_turns(f"{count:,} versions", sides, rounds=5)
    for title, values in found.items():
        bench.report.figure(f"registry: {title}", f"{count:,} versions", "CPU s", Side(title, values))
    store.calls.clear()
    claims.take("last", "c")
    bench.report.note(f"Taking a number with {count:,} versions: {_said(store.calls)}.")
    shutil.rmtree(names)  # as an earlier vlmpipe, which knew no names, left it
    store.calls.clear()
    title, data = "registry: the first number where claims have no names", f"{count:,} versions"
    bench.report.figure(title, data, "CPU s", Side("", [_timed(lambda: claims.take("one", "c"))]))
    bench.report.note(f"The first number with {count:,} versions whose claims have no names: {_said(store.calls)}.")


def _said(calls: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(calls.items()))


def _timed(work: Callable[[], object]) -> float:
    before_s = time.process_time()
    work()
    return time.process_time() - before_s
