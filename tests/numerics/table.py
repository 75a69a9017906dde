"""The tests that compare numbers, under other kernels, threads and orders of sums (make test-numerics).

python -m tests.numerics.table [--only SETTING] [FILE ...]

Prints a line for each setting and file and a table at the end. Exit code 1 where a test failed.
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

from tests.numerics.settings import SETTINGS, Setting
from tests.support.paths import ROOT

COMPARES = re.compile(r"require_equal_training|assert_close|torch\.equal\(|losses\([^)]*\)+ == ")
FOLDERS = ("tests/unit/trainer", "tests/integration/trainer")
COUNTED = re.compile(r"(\d+) (passed|failed|error|skipped)")
LIMIT_S = 3600  # of one file under one setting


def comparing() -> list[Path]:
    """Test files of the trainer that compare numbers of two computations; those of whole runs last."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("test_*.py"))]
    return [path.relative_to(ROOT) for path in found if COMPARES.search(path.read_text())]


def tried(setting: Setting, file: Path) -> tuple[dict[str, int], str]:
    """How many tests ended how, and what was said where some failed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **setting.environment}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--show-capture=no", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(file)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    (*_, last) = done.stdout.strip().splitlines() or [""]
    counts = {kind: int(number) for number, kind in COUNTED.findall(last)}
    if done.returncode and not counts.keys() & {"failed", "error"}:
        counts["error"] = 1  # not even collected
    return counts, done.stdout + done.stderr if done.returncode else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SETTINGS, help="one setting")
    parser.add_argument("files", nargs="*", type=Path, help="test files; all that compare numbers without it")
    given = parser.parse_args(arguments)
    files = given.files or comparing()
    chosen = {name: setting for name, setting in SETTINGS.items() if given.only in (None, name)}
    rows: list[tuple[str, str]] = []
    failed = 0
    for name, setting in chosen.items():
        if why := setting.missing():
            rows.append((name, f"not tried: {why}"))
            continue
        total: dict[str, int] = {}
        for file in files:
            started_s = time.monotonic()
            counts, said = tried(setting, file)
            shown = ", ".join(f"{number} {kind}" for kind, number in counts.items())
            print(f"{name}: {file}: {shown} in {time.monotonic() - started_s:.0f} s\n{said}".rstrip(), flush=True)
            total = {kind: total.get(kind, 0) + counts.get(kind, 0) for kind in {**total, **counts}}
        failed += total.get("failed", 0) + total.get("error", 0)
        numbers = (f"{total.get(kind, 0):>6} {kind}" for kind in ("passed", "failed", "error", "skipped"))
        rows.append((name, "".join(numbers)))
    print(f"\n{len(files)} files")
    for name, numbers in rows:
        print(f"{name:<30}{numbers}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
