"""Imports go one way: pipelines -> components -> trainer, and the light parts stay light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What a package may not import when a module of it is loaded. Imports inside functions are free: a KFP step's body runs
# as a program of its own, and a command imports what it needs when it is called.
FORBIDDEN = {
    "trainer": ("kfp", "google_cloud_pipeline_components", "google.cloud.aiplatform", "components", "pipelines"),
    "components": ("pipelines",),
    "pipelines": ("torch", "transformers", "deepspeed"),
}
# The trainer image has no kfp at all, so there not even a function may import it.
FORBIDDEN_ANYWHERE = {"trainer": FORBIDDEN["trainer"]}


def _imports(tree: ast.AST, *, in_functions: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, or only of those that run when the module is loaded."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif _never_runs_at_load(node) and not in_functions:
            continue
        else:
            yield from _imports(node, in_functions=in_functions)


def _never_runs_at_load(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _violations(source: str, forbidden: tuple[str, ...], *, in_functions: bool) -> list[tuple[int, str]]:
    return [
        (line, name)
        for line, name in _imports(ast.parse(source), in_functions=in_functions)
        if any(name == banned or name.startswith(f"{banned}.") for banned in forbidden)
    ]


@pytest.mark.parametrize("in_functions", [False, True], ids=["module", "anywhere"])
@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_only_what_is_below_it(package: str, in_functions: bool) -> None:
    forbidden = (FORBIDDEN_ANYWHERE if in_functions else FORBIDDEN).get(package, ())
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files
        for line, name in _violations(file.read_text(), forbidden, in_functions=in_functions)
    ]
    assert found == []


def test_the_check_itself_sees_imports() -> None:
    source = "import os\nif True:\n    from google.cloud import aiplatform\ndef f():\n    import kfp.dsl\n"
    forbidden = FORBIDDEN["trainer"]
    assert _violations(source, forbidden, in_functions=False) == [(3, "google.cloud.aiplatform")]
    assert _violations(source, forbidden, in_functions=True)[1:] == [(5, "kfp.dsl")]


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("vlmpipe.cli.app", {"torch", "transformers", "deepspeed", "kfp", "google.cloud.aiplatform"}),
        ("trainer.config.job", {"torch", "transformers", "pyarrow"}),
        ("trainer.data.prepare.pipeline", {"torch", "transformers"}),
        ("trainer.data.prepare.chunks.worker_pool", {"torch", "transformers"}),
    ],
)
def test_a_light_module_loads_nothing_heavy(module: str, heavy: set[str]) -> None:
    program = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert heavy & set(json.loads(answer.stdout)) == set()
