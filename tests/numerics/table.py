"""The tests that compare numbers, under other kernels, threads and orders of sums (make test-numerics).

python -m tests.numerics.table [--only SETTING] [FILE ...]

Prints a line for each setting, after what its failed tests said. Exit code 1 where a test failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.numerics.settings import COMPARES, SETTINGS, Setting
from tests.support.paths import ROOT

FOLDERS = ("tests/unit/trainer", "tests/integration/trainer")
COUNTED = re.compile(r"(\d+) (passed|failed|error|skipped)")
LIMIT_S = 7200  # of one setting
PATIENT = {"VLMPIPE_TESTS_PATIENCE": "10"}  # minutes of all processors: there is other work beside it
PYTEST = (
    f"--timeout={LIMIT_S}",
    "-q",
    "--tb=short",
    "--show-capture=no",
    "-p",
    "no:cacheprovider",
    "--dist",
    "loadfile",
)


def comparing(pattern: re.Pattern[str] = COMPARES) -> list[Path]:
    """Test files of the trainer that compare numbers of two computations; those of whole runs last."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("test_*.py"))]
    return [path.relative_to(ROOT) for path in found if pattern.search(path.read_text())]


def tried(setting: Setting, files: Sequence[Path], processes: int = 0) -> tuple[dict[str, int], str]:
    """How many tests ended how, and what was said where some failed."""
    environment = {**os.environ, **PATIENT, "OMP_NUM_THREADS": "1", **setting.environment}
    command = [sys.executable, "-m", "pytest", *PYTEST, "--numprocesses", str(processes), *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    (*_, last) = done.stdout.strip().splitlines() or [""]
    counts = {kind: int(number) for number, kind in COUNTED.findall(last)}
    if done.returncode and not counts.keys() & {"failed", "error"}:
        counts["error"] = 1  # not even collected
    return counts, done.stdout + done.stderr if done.returncode else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SETTINGS, metavar="SETTING", help=f"one of: {'; '.join(SETTINGS)}")
    parser.add_argument("--processes", type=int, default=2, help="files that are tested at the same time")
    parser.add_argument("files", nargs="*", type=Path, help="test files; all that compare numbers without it")
    given = parser.parse_args(arguments)
    failed = False
    for name, setting in SETTINGS.items():
        if given.only not in (None, name):
            continue
        if why := setting.missing():
            print(f"{name:<28}not tried: {why}", flush=True)
            continue
        files, started_s = given.files or comparing(setting.compared), time.monotonic()
        counts, said = tried(setting, files, given.processes)
        failed = failed or bool(said)
        shown = ", ".join(f"{number} {kind}" for kind, number in counts.items())
        print(
            f"{said}\n{name:<28}{len(files)} files: {shown} in {time.monotonic() - started_s:.0f} s".strip(), flush=True
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
