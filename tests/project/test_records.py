"""Laws of records: one type reads and writes a file, and untyped annotations may only become fewer."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vlmpipe.trainer.records.metrics import FILE as METRICS_FILE
from vlmpipe.trainer.records.record import Record
from vlmpipe.trainer.storage.records import RUN_FILE

PACKAGES = ("vlmpipe", "pipelines", "components", "trainer")
ROOMS = ("trainer/records", "vlmpipe/records")
# The form of a record on disk, and the records whose addresses follow a moved run.
BYTES = Path("trainer/storage/records.py")
PARSERS = {
    "read_record", "read_record_file", "read_as_written", "read_lines", "unseal", "unseal_lines", "write_record",
    "seal", "loads", "dumps", "optional", "content", "_content",
}  # fmt: skip
# Parameters, returned values and fields whose annotation says Any. A number here may only fall, and follows within
# SLACK what is left.
SLACK = 20
# Modules that take run.json as it was written, and why; all others read it as JobConfig or RunSettings.
READ_AS_JSON = {
    "trainer/config/job.py": "JobConfig",
    "vlmpipe/config/run_settings.py": "RunSettings",
    "trainer/trials/sweep.py": "a digest of its text",
    "components/runtime/sweep_steps.py": "a digest of its text",
    "trainer/trials/tune.py": "a trial's copy, with other values by their dotted names",
    "pipelines/tune/search.py": "whole sections, compared and copied",
    "vlmpipe/comparison/sides.py": "differences between runs of any version",
    "vlmpipe/runs/folders/sweep.py": "one number, by commands that start without the run file's sections",
    "vlmpipe/report/load.py": "a table of all values, of any version",
}
MAX_UNTYPED = {"vlmpipe": 62, "pipelines": 10, "components": 2, "trainer": 108}


@cache
def _sources() -> dict[Path, str]:
    return {
        path.relative_to(ROOT): path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if not any(part.is_symlink() for part in path.parents)
    }


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_sources()[path])


def _nodes(*texts: str) -> Iterator[tuple[Path, ast.AST]]:
    """The nodes of modules with one of these texts."""
    for path, source in _sources().items():
        if any(text in source for text in texts):
            yield from ((path, node) for node in ast.walk(_tree(path)))


def _annotations(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            yield from (one.annotation for one in named if one and one.annotation)
            if node.returns:
                yield node.returns
        elif isinstance(node, ast.AnnAssign):
            yield node.annotation


def _is_untyped(annotation: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation))


def _records() -> dict[Path, list[type[Record]]]:
    """The record types of each module that defines any."""
    found: dict[Path, list[type[Record]]] = {}
    for path in _sources():
        if str(path.parent) in ROOMS and path.stem != "__init__":
            module = importlib.import_module("vlmpipe." + ".".join(path.with_suffix("").parts).removeprefix("vlmpipe."))
            types = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Record)]
            found[path] = [one for one in types if one.__module__ == module.__name__ and "FILE" in vars(one)]
    return {path: types for path, types in found.items() if types}


@pytest.mark.parametrize("package", PACKAGES)
def test_untyped_annotations_become_fewer(package: str) -> None:
    counts = Counter(
        str(path)
        for path, source in _sources().items()
        if path.parts[0] == package and "Any" in source
        for annotation in _annotations(_tree(path))
        if _is_untyped(annotation)
    )
    most = MAX_UNTYPED[package]
    assert counts.total() <= most, f"give new values a type; most are in {counts.most_common(5)}"
    assert counts.total() > most - SLACK, f"lower MAX_UNTYPED[{package!r}] to {counts.total()}"


def test_the_name_of_a_record_stands_in_its_own_module() -> None:
    """Others say `DataPointers.FILE`, so that a search for the type finds every reader."""
    owners = {record.FILE: path for path, types in _records().items() for record in types}
    owners[METRICS_FILE] = Path("trainer/records/metrics.py")
    assert owners, "records were found"
    found = {
        f"{path}:{node.lineno} {node.value}"
        for path, node in _nodes(*owners)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in [node.value.rpartition("/")[2]]
        if name in owners and path not in (owners[name], BYTES)
    }
    assert found == set()


def test_the_folder_of_step_records_is_named_in_their_module() -> None:
    found = {
        f"{path}:{node.lineno}"
        for path, node in _nodes("steps/")
        if isinstance(node, ast.JoinedStr | ast.Constant) and re.search(r"(^|/)steps/[^ ]*$", _text(node))
    }
    assert {place for place in found if not place.startswith("trainer/records/step.py:")} == set()


def _text(node: ast.JoinedStr | ast.Constant) -> str:
    """The text of a literal; of an f-string with {} for each value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def test_only_its_type_parses_a_record() -> None:
    """A call such as `read_record(store, DataPointers.FILE)` would give a reader strings to index."""
    names = {record.__name__ for types in _records().values() for record in types}
    found = {
        f"{path}:{node.lineno}"
        for path, node in _nodes(".FILE")
        if str(path.parent) not in ROOMS
        and isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) in PARSERS
        and any(
            isinstance(inner, ast.Attribute)
            and inner.attr == "FILE"
            and isinstance(inner.value, ast.Name)
            and inner.value.id in names
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]
            for inner in ast.walk(argument)
        )
    }
    assert found == set()


def test_a_runs_settings_are_read_by_their_types() -> None:
    def names_the_file(argument: ast.AST) -> bool:
        return (isinstance(argument, ast.Constant) and argument.value == RUN_FILE) or (
            isinstance(argument, ast.Name) and argument.id == "RUN_FILE"
        )

    readers = {
        str(path)
        for path, node in _nodes("read_record", "read_as_written", ".content(")
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) in PARSERS - {"write_record", "seal"}
        and any(names_the_file(argument) for argument in node.args)
    }
    assert readers - {"trainer/storage/records.py"} == set(READ_AS_JSON)
