"""Python 3.12.1 gives a global name that one comprehension reads no value (UnboundLocalError) where an earlier
comprehension of the same function binds it. Python 3.11.7 and 3.13.0 give it its value."""

from __future__ import annotations

import symtable
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

INLINED = {"listcomp", "setcomp", "dictcomp"}  # by Python 3.12, into what they stand in
PACKAGES = ("vlmpipe", "trainer", "pipelines", "components")


def unsafe(table: symtable.SymbolTable) -> Iterator[str]:
    """Function and name of each global name that one comprehension reads and another one binds."""
    comprehensions = list(_inlined(table))
    bound = {each.get_name() for one in comprehensions for each in one.get_symbols() if each.is_local()}
    read = {each.get_name() for one in comprehensions for each in one.get_symbols() if each.is_global()}
    yield from (f"{table.get_name()}: {name}" for name in sorted(bound & read))
    for parent in (table, *comprehensions):
        for child in parent.get_children():
            if child.get_name() not in INLINED:
                yield from unsafe(child)


def _inlined(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        if child.get_name() in INLINED:
            yield child
            yield from _inlined(child)


def _table(text: str) -> symtable.SymbolTable:
    return symtable.symtable(text, "file", "exec")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_comprehension_reads_a_global_name_that_another_binds(package: str) -> None:
    paths: list[Path] = sorted((ROOT / package).rglob("*.py"))
    assert len(paths) > 10
    found = {str(path.relative_to(ROOT)): list(unsafe(_table(path.read_text()))) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_pattern_is_found_and_nothing_like_it() -> None:
    first = "rank = {name: number for number, name in enumerate('ab')}\n"
    other = "[number(each) for each in 'ab']"
    function = "def number(value): ...\ndef f():\n    "
    assert list(unsafe(_table(f"{function}{first}    return {other}"))) == ["f: number"]
    assert list(unsafe(_table(f"{function}return [{other} for _ in {other}], [number for number in 'ab']"))) == [
        "f: number"
    ]
    assert list(unsafe(_table(f"{function}{first}    return number(1)"))) == []
    assert list(unsafe(_table(f"{function}return {other}"))) == []
