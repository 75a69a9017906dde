"""Stages every incident and says what `vlmpipe diagnose` named: python -m tests.incidents.table (make incidents)

With --only TEXT: those whose name contains it. The full disk needs the right to mount one. Exit code 1 where fewer
than nine tenths are named right.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.incidents.staged import INCIDENTS, Incident, Scene

LEAST = 0.9


def staged(one: Incident) -> tuple[bool, str, float]:
    """Whether the cause was named right, what was said, and the seconds that it took."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vlmpipe-incident-") as folder:
        scene = Scene(Path(folder))
        try:
            one.stage(scene)
            found = scene.diagnosis()
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            found = {"id": None, "cause": f"not staged: {error}"}
        finally:
            subprocess.run(["umount", f"{folder}/runs"], capture_output=True)
    named = found.get("id") or next((name for name in one.causes if is_beside(name, found)), None)
    return named in one.causes, f"{named or '–'}: {found.get('cause') or found}", time.monotonic() - started_s


def is_beside(name: str, found: dict[str, object]) -> bool:
    """Whether a warning of a run that is done names the cause."""
    from vlmpipe.runs.failure_patterns import patterns

    also = found.get("also")
    cause = next(pattern.cause for pattern in patterns() if pattern.id == name)
    return isinstance(also, list) and any(str(text).startswith(cause) for text in also)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.incidents.table", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT")
    options = parser.parse_args()
    cases = [one for one in INCIDENTS.values() if options.only in one.name]
    right = 0
    for number, one in enumerate(cases, 1):
        is_right, said, seconds = staged(one)
        right += is_right
        print(
            f"{number:2}/{len(cases)} {'ok   ' if is_right else 'WRONG'} {seconds:5.0f} s  {one.name}: {said[:150]}",
            flush=True,
        )
    print(f"{right} of {len(cases)} incidents are named right")
    return 0 if right >= LEAST * len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
