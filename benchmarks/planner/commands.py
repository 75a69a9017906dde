"""Part `commands`: what the commands take, before a run does any work or after it, in CPU seconds of their processes.

`import kfp` is the yardstick of compile: nobody who compiles for KFP can do without it. The first plan of a model
traces it, the second finds the cached analysis. submit plans, compiles, looks at buckets and sends to a strict stand-in
of Vertex AI, a process of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.planner.compared_runs import write_runs
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench

ROOT = Path(__file__).parents[2]
RUN_FILES = [str(path) for path in sorted((ROOT / "configs").glob("*.yaml"))]
PLANNED = str(ROOT / "configs/llava-7b.yaml")
PROJECT = "gcp.project=my-project"
COMMAND = [sys.executable, "-m", "vlmpipe.cli.app"]
FIGURES = (  # name, what it is, on which data
    ("nothing", "python alone", ""),
    ("help", "vlmpipe --help", ""),
    ("check", "vlmpipe check", "7B"),
    ("first plan", "vlmpipe plan, nothing cached", "7B"),
    ("next plan", "vlmpipe plan, again", "7B"),
    ("compile", "vlmpipe compile", "configs/*.yaml"),
    ("import kfp", "import kfp", ""),
    ("submit", "vlmpipe submit, planned before", "7B"),
    ("compare", "vlmpipe compare, with its page", "10,000 questions"),
)


def commands(bench: Bench) -> None:
    """Every command in turn."""
    folder = bench.scratch
    cached = {"VLMPIPE_CACHE_DIR": str(folder / "analyses")}
    sides: dict[str, Callable[[], float]] = {
        "nothing": partial(cpu_s, [sys.executable, "-c", "pass"]),
        "import kfp": partial(cpu_s, [sys.executable, "-c", "import kfp"]),
        "compile": partial(cpu_s, [*COMMAND, "compile", *RUN_FILES, "--output", str(folder / "out")]),
        "help": partial(cpu_s, [*COMMAND, "--help"]),
        "check": partial(cpu_s, [*COMMAND, "check", PLANNED]),
        "first plan": lambda: first_plan([*COMMAND, "plan", PLANNED]),
        "next plan": partial(cpu_s, [*COMMAND, "plan", PLANNED], cached),
    }
    compare = [*COMMAND, "compare", *write_runs(folder / "compared"), "--html", str(folder / "compared.html")]
    sides["compare"] = partial(cpu_s, compare)
    with rehearsal(PROJECT) as servers:
        numbers = itertools.count()
        submit = [*COMMAND, "submit", PLANNED, PROJECT, "--yes", "--detach"]
        sides["submit"] = lambda: cpu_s([*submit, f"name=bench-{next(numbers)}"], cached | servers)
        found = bench.take_turns("every command", sides)
    report = bench.report
    # More is better in this table: what a CPU second does.
    done = {name: Side(name, [1 / value for value in values]) for name, values in found.items()}
    report.compare("all shipped run files compiled", "configs/*.yaml", "/ CPU s", done["compile"], done["import kfp"])
    report.compare("a plan of a model planned before", "7B", "/ CPU s", done["next plan"], done["first plan"])
    for name, what, data in FIGURES:
        report.figure(what, data, "CPU s", Side(name, found[name]))


@contextlib.contextmanager
def rehearsal(*overrides: str) -> Iterator[dict[str, str]]:
    """A strict stand-in of Vertex AI and its buckets in a process of its own; the variables that lead to it."""
    serve = [*COMMAND, "rehearse", PLANNED, *overrides]
    with subprocess.Popen(
        serve, cwd=ROOT, stdout=subprocess.PIPE, text=True, encoding="utf-8", errors="replace"
    ) as server:
        assert server.stdout
        exported = next(line for line in server.stdout if line.strip().startswith("export "))
        try:
            yield dict(variable.split("=", 1) for variable in exported.split()[1:])
        finally:
            server.terminate()


def first_plan(command: list[str]) -> float:
    """On a machine that has planned nothing."""
    with tempfile.TemporaryDirectory(prefix="vlmpipe-first-") as folder:
        return cpu_s(command, {"VLMPIPE_CACHE_DIR": folder})


def cpu_s(command: list[str], variables: dict[str, str] | None = None) -> float:
    """CPU seconds of a command and of what it starts. Raises CalledProcessError when it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, env=os.environ | (variables or {}), check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
