"""The registry of cases, and the page that shows it."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

from tests.crash.matrix import documented, registered
from tests.support.crash.cases import CASES, GROUPS
from tests.support.paths import ROOT

PAGE = ROOT / "docs/reference/failure-modes.md"
HEADER = "| group | fault | outcome | proof |\n|---|---|---|---|\n"


def test_the_page_holds_every_case_and_nothing_else() -> None:
    _, _, rest = PAGE.read_text().partition(HEADER)
    assert rest, "the table's header has changed"
    rows = rest.partition("\n\n")[0].splitlines()
    assert rows == documented(), "write the rows of `python -m tests.crash.matrix --docs` into the page"


def test_every_group_has_cases() -> None:
    assert {found.group for found in registered()} == set(GROUPS)


def test_every_other_proof_on_the_page_exists() -> None:
    """Rows beside the table name tests by file::function, and make targets."""
    text, root = PAGE.read_text(), PAGE.parents[2]
    targets = re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= set(targets)
    for file, function in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        tree = ast.parse((root / file).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not function or function in functions, f"{file} has no {function}"


def test_a_case_belongs_to_a_test_that_pytest_runs() -> None:
    registered()
    for test, _ in CASES:
        file, _, function = test.partition("::")
        module = importlib.import_module(f"tests.crash.{Path(file).stem}")
        assert function.startswith("test_") and callable(getattr(module, function))
