"""The whole fault matrix as a table, point by outcome: python -m tests.crash.matrix (make crash-matrix)

With --docs: the rows of docs/reference/failure-modes.md, from the same registry.
"""

from __future__ import annotations

import importlib
import os
import sys
import time

import pytest

from tests.support.paths import ROOT

FOLDER = ROOT / "tests/crash"
BUDGET_S = 180.0


def registered() -> list[Case]:
    """Every case, in the order of the files and of the tests in them."""
    for path in sorted(FOLDER.glob("test_*.py")):
        importlib.import_module(f"tests.crash.{path.stem}")
    return list(CASES.values())


def documented() -> list[str]:
    """The rows of the page, one for each test, whatever it is called with."""
    rows: dict[str, list[Case]] = {}
    for found in registered():
        rows.setdefault(found.test, []).append(found)
    lines = []
    # By group, file, and place in the file, whatever the order in which files were imported.
    in_order = sorted(rows.items(), key=lambda row: (GROUPS.index(row[1][0].group), row[0].partition("::")[0]))
    for test, cases in in_order:
        what = cases[0].template.format(", ".join(each.value for each in cases))
        lines.append(f"| {cases[0].group} | {what} | {cases[0].outcome} | `tests/crash/{test}` |")
    return lines


class Table:
    """A pytest plugin that prints one line for each case."""

    def __init__(self) -> None:
        self.failed = self.passed = 0
        self._cases: dict[str, Case] = {}
        self._group = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        for item in items:
            parameters = getattr(item, "callspec", None)
            values = [str(value) for value in parameters.params.values()] if parameters else []
            place = f"{item.path.name}::{item.originalname}"
            for value in [*values, ""]:
                if (place, value) in CASES:
                    self._cases[item.nodeid] = CASES[place, value]
                    break

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self._cases.get(report.nodeid)
        if report.when != "call" and not report.failed:
            return
        self.failed += report.failed
        self.passed += report.passed
        if found is None:
            if report.failed:
                print(f"  FAILED  {report.nodeid}\n{report.longreprtext}", flush=True)
            return
        if found.group != self._group:
            self._group = found.group
            print(f"\n{found.group}", flush=True)
        store = "gcs" if "[gcs" in report.nodeid or found.group == "storage" else "local"
        verdict = "ok    " if report.passed else "FAILED"
        print(f"  {verdict} {store:5} {report.duration:5.1f} s  {found.what}: {found.outcome}", flush=True)
        if report.failed:
            print(report.longreprtext, flush=True)


def main() -> int:
    if "--docs" in sys.argv:
        print("\n".join(documented()))
        return 0
    registered()
    table, started = Table(), time.monotonic()
    # The project's own options are pytest's terminal's, in whose place the table prints.
    arguments = [str(FOLDER), "-o", "addopts=--import-mode=importlib", "-p", "no:terminal", "-p", "no:cacheprovider"]
    code = pytest.main(arguments, plugins=[table])
    took_s = time.monotonic() - started
    print(f"\n{table.passed} passed, {table.failed} failed in {took_s:.0f} s (at most {BUDGET_S:.0f} on two cores)")
    return int(code)


if __name__ == "__main__":
    os.environ["VLMPIPE_CRASH_MATRIX"] = "full"  # before the registry is imported: it reads it

from tests.support.crash.cases import CASES, GROUPS, Case  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
