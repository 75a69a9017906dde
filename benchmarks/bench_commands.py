"""What the commands take before they do any work, in CPU seconds of their own processes.

    python -m benchmarks.bench_commands

`import kfp` is the yardstick of compile: nobody who compiles for KFP can do without it. The first plan of a model
traces it, the second finds what the first has kept. submit plans, compiles, looks at buckets and sends; Google's own
submit sends a file that was compiled before. Both send to the same strict stand-in, a process of its own.
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

from benchmarks.common import interleaved, options
from benchmarks.report import Report, Side

ROOT = Path(__file__).parents[1]
RUN_FILES = [str(path) for path in sorted((ROOT / "configs").glob("*.yaml"))]
PLANNED = str(ROOT / "configs/llava-7b-zero2-spot.yaml")
PROJECT, COMPILED = "my-project", "llava-7b-zero2-spot.vertex.yaml"
ROUNDS = 5


def main() -> None:
    chosen = options(__doc__)
    rounds = chosen.rounds or (1 if chosen.quick else ROUNDS)
    report = Report("Commands", {"rounds": rounds, "run files": len(RUN_FILES)})
    with tempfile.TemporaryDirectory(prefix="vlmpipe-commands-") as folder:
        command = [sys.executable, "-m", "vlmpipe.cli.app"]
        compile_all = [*command, "compile", *RUN_FILES, "--output", str(Path(folder, "out"))]
        kept = {"VLMPIPE_CACHE_DIR": str(Path(folder, "kept"))}
        sides: dict[str, Callable[[], float]] = {
            "nothing": partial(cpu_s, [sys.executable, "-c", "pass"]),
            "import kfp": partial(cpu_s, [sys.executable, "-c", "import kfp"]),
            "compile": partial(cpu_s, compile_all),
            "help": partial(cpu_s, [*command, "--help"]),
            "check": partial(cpu_s, [*command, "check", PLANNED]),
            "first plan": lambda: first_plan([*command, "plan", PLANNED]),
            "next plan": partial(cpu_s, [*command, "plan", PLANNED], kept),
        }
        project = f"gcp.project={PROJECT}"
        subprocess.run([*command, "compile", PLANNED, project, "--output", folder], cwd=ROOT, check=True)
        with rehearsal(project) as servers:
            there = kept | servers
            submit = [*command, "submit", PLANNED, project, "--yes", "--detach"]
            numbers = itertools.count()
            sides["submit"] = lambda: cpu_s([*submit, f"name=bench-{next(numbers)}"], there)
            by_sdk = [sys.executable, "-m", "benchmarks.submit_by_sdk", str(Path(folder, COMPILED)), PROJECT]
            sides["SDK's submit"] = partial(cpu_s, by_sdk, there)
            found = interleaved(sides, rounds)
    report.require(all(value > 0 for values in found.values() for value in values), "every command ends well")
    seconds = {name: Side(name, values) for name, values in found.items()}
    # More is better in this table: what a CPU second does.
    done = {name: Side(name, [1 / value for value in values]) for name, values in found.items()}
    report.compare("all shipped run files compiled", "configs/*.yaml", "/ CPU s", done["compile"], done["import kfp"])
    report.compare("a plan of what was planned before", "7B", "/ CPU s", done["next plan"], done["first plan"])
    report.compare("a run started", "7B", "/ CPU s", done["submit"], done["SDK's submit"])
    for name, what in (
        ("nothing", "python alone"),
        ("help", "vlmpipe --help"),
        ("check", "vlmpipe check"),
        ("first plan", "vlmpipe plan, nothing kept"),
        ("next plan", "vlmpipe plan, again"),
        ("compile", "vlmpipe compile"),
        ("import kfp", "import kfp"),
        ("submit", "vlmpipe submit, planned before"),
        ("SDK's submit", "the SDK's submit of a compiled file"),
    ):
        of_one = name in ("check", "first plan", "next plan", "submit", "SDK's submit")
        report.figure(what, "7B" if of_one else "", "CPU s", seconds[name])
    report.publish(chosen)


@contextlib.contextmanager
def rehearsal(*overrides: str) -> Iterator[dict[str, str]]:
    """A strict stand-in of Vertex AI and its buckets in a process of its own; the variables that lead to it."""
    serve = [sys.executable, "-m", "vlmpipe.cli.app", "rehearse", PLANNED, *overrides]
    with subprocess.Popen(serve, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        told = next(line for line in server.stdout if line.strip().startswith("export "))
        try:
            yield dict(variable.split("=", 1) for variable in told.split()[1:])
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


if __name__ == "__main__":
    main()
