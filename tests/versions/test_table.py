"""The table of versions counts what it leaves out, and a row that fails is one."""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.versions import table
from tests.versions.table import EXTRAS, LAWS, ROWS, TEST_TOOLS, Row, RowFailedError, main, tried


def test_all_versions_that_the_package_allows_are_rows() -> None:
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    minors = [int(row.python.partition(".")[2]) for row in ROWS]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert allowed == f">=3.{minors[0]},<3.{minors[-1] + 1}"
    assert {row.resolution for row in ROWS} == {"lowest-direct", "highest"}


def test_the_laws_are_there() -> None:
    assert [law for law in LAWS if not (ROOT / law).exists()] == []


def test_what_the_laws_import_is_installed_for_them() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = {_name(needed) for extra in EXTRAS for needed in extras[extra]} | {*TEST_TOOLS}
    elsewhere = {_name(needed) for needed in itertools.chain(*extras.values())} - installed - {"vlmpipe"}
    distributions = importlib.metadata.packages_distributions()  # several of a namespace, such as google's
    of_modules = (set(distributions.get(module.split(".")[0], ())) for module in _imported_by(LAWS))
    imported = {_name(each) for only in of_modules if len(only) == 1 for each in only}
    assert "torch" in imported and imported & elsewhere == set()


def _name(requirement: str) -> str:
    return re.split(r"[<>=\[]", requirement)[0].lower().replace("_", "-")


def _imported_by(places: Iterable[str]) -> set[str]:
    """Modules that test files under `places` import, and those that the modules of tests/ import in turn."""
    roots = [ROOT / place for place in places]
    waiting = [path for root in roots for path in (root.rglob("*.py") if root.is_dir() else (root,))]
    found: set[str] = set()
    while waiting:
        for node in ast.walk(ast.parse(waiting.pop().read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in {*names} - found:
                found.add(name)
                path = ROOT / f"{name.replace('.', '/')}.py"
                if name.startswith("tests.") and path.exists():
                    waiting.append(path)
    return found


def test_a_command_that_leads_nowhere_is_no_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As pyenv's, for versions that it has and has not chosen."""
    shim, real = tmp_path / "python3.12", tmp_path / "versions/3.12.1/bin/python"
    real.parent.mkdir(parents=True)
    for file, code in ((shim, 127), (real, 0)):
        file.write_text(f"#!/bin/sh\nexit {code}\n")
        file.chmod(0o755)
    monkeypatch.setattr(table.shutil, "which", lambda _: str(shim))
    monkeypatch.setattr(table, "PYENV", tmp_path)
    assert table.interpreter("3.12") == str(real)
    assert table.interpreter("3.13") == ""


def test_a_row_without_its_interpreter_is_left_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "interpreter", lambda _: "")
    assert tried(Row("3.12", "highest"), "uv", "cpu") == (True, "left out: there is no python3.12 on this machine")


def test_a_step_that_fails_fails_the_row_and_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(python: Path, folder: Path) -> None:
        raise RowFailedError("pytest ended with 1")

    monkeypatch.setattr(table, "interpreter", lambda python: f"/bin/python{python}" if python == "3.13" else "")
    monkeypatch.setattr(table, "install", lambda *_: Path("python"))
    monkeypatch.setattr(table.shutil, "which", lambda _: "uv")
    monkeypatch.setattr(table, "STEPS", {"quickstart": lambda *_: None, "laws": fails})
    assert main([]) == 1
    said = capsys.readouterr().out
    assert "Python 3.13  highest        failed: laws" in said and "pytest ended with 1" in said
    assert said.count("left out") == 2


def test_a_machine_without_uv_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table.shutil, "which", lambda _: None)
    with pytest.raises(SystemExit, match="pip install uv"):
        main([])
