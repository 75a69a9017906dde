"""A platform is a room and a line of a table: nothing else asks for its name, its classes or its modules.

The delete test: without the room of a service and its line, the rest imports, and its commands run.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vlmpipe.platforms.base import Platform
from vlmpipe.platforms.table import PLATFORMS, platform_of

ROOM = ROOT / "vlmpipe/platforms"
PACKAGES = ("vlmpipe", "pipelines", "components")
OUTSIDE = {
    "vlmpipe/api.py": "vlmpipe.run starts the pipeline as processes of this machine and waits, as no service does",
    "vlmpipe/cli/init.py": "a template of run files has the name of a platform",
    "vlmpipe/access/needs.py": "a kind of address, not a platform",
    "vlmpipe/rehearsal/serve.py": "plays Vertex AI itself",
}
TABLE = "vlmpipe/platforms/table.py"
# Modules that import from a platform's room, beside the table with its line. None may import from one of a service.
IMPORTING = {"vertex": [TABLE], "kubeflow": [TABLE], "local": ["vlmpipe/api.py", TABLE]}
SERVICES = [name for name, line in PLATFORMS.items() if line.submits]
IMPORTS_ALL = """
import importlib, pkgutil, vlmpipe
names = [module.name for module in pkgutil.walk_packages(vlmpipe.__path__, "vlmpipe.")]
names = [name for name in names if not name.startswith("vlmpipe.trainer.") and not name.endswith(".__main__")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


@functools.cache
def _classes() -> set[str]:
    """Names of the classes of platforms."""
    trees = (ast.parse(path.read_text()) for name in PLATFORMS for path in (ROOM / name).rglob("*.py"))
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _is_name(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return node.value in PLATFORMS
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_is_name, node.elts))
    return isinstance(node, ast.Attribute) and node.attr in PLATFORMS and node.attr != "local"


def _asks(node: ast.AST, classes: set[str]) -> bool:
    """Whether the expression or import asks which platform it is."""
    if isinstance(node, ast.Compare):
        return any(map(_is_name, (node.left, *node.comparators)))
    if isinstance(node, ast.MatchValue):
        return _is_name(node.value)
    if isinstance(node, ast.Dict):
        return any(key is not None and _is_name(key) for key in node.keys)
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        named = (f"{module}{one.name}." for one in node.names)
        return any(text.startswith(f"vlmpipe.platforms.{name}.") for text in named for name in PLATFORMS)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "platform_of":
            return any(map(_is_name, (*node.args, *(one.value for one in node.keywords))))
        if node.func.id == "isinstance":
            return bool({one.id for one in ast.walk(node.args[1]) if isinstance(one, ast.Name)} & classes)
    return False


def _modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (path for path in (ROOT / package).rglob("*.py") if ROOM not in path.parents)


def naming(name: str) -> list[str]:
    """Modules outside a platform's room with the name of a module in it, imported or in a text."""
    package = re.compile(rf"\bvlmpipe\.platforms\.{name}\b|from vlmpipe\.platforms import .*\b{name}\b")
    paths = (path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py") if ROOM / name not in path.parents)
    return sorted(str(path.relative_to(ROOT)) for path in paths if package.search(path.read_text()))


def asking(source: str) -> bool:
    """Whether a module asks for a platform."""
    classes = _classes()
    return any(_asks(node, classes) for node in ast.walk(ast.parse(source)))


def test_only_what_is_written_here_asks_for_a_platform() -> None:
    classes = _classes()
    found = {
        str(path.relative_to(ROOT))
        for path in _modules()
        if any(_asks(node, classes) for node in ast.walk(ast.parse(path.read_text())))
    }
    assert found == set(OUTSIDE)


@pytest.mark.parametrize(
    "source",
    [
        'if target == "kubeflow": pass',
        'if target in ("vertex", "local"): pass',
        'elsewhere = "local" != target',
        "if target == Target.kubeflow: pass",
        "isinstance(found, KubeflowRun | None)",
        "def f():\n    from vlmpipe.platforms.vertex.endpoint import VertexEndpoint",
        "import vlmpipe.platforms.vertex.endpoint as endpoint",
        "from vlmpipe.platforms import kubeflow",
        'match target:\n    case "vertex":\n        pass',
        '{"vertex": 1, "kubeflow": 2}.get(target, 3)',
        'platform_of("vertex")',
        'platform_of(name="vertex")',
    ],
)
def test_each_way_to_ask_is_seen(source: str) -> None:
    assert asking(source) and not asking("platform_of(target).check(config)")


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_line_of_the_table_names_a_platform(name: str) -> None:
    platform = platform_of(name)
    assert isinstance(platform, Platform) and platform.name == name and platform.title


@pytest.mark.parametrize("name", PLATFORMS)
def test_nothing_imports_from_a_platforms_room_but_its_line_of_the_table(name: str) -> None:
    assert naming(name) == IMPORTING[name]
    assert (ROOT / TABLE).read_text().count(f"vlmpipe.platforms.{name}.") == 1


@pytest.fixture(params=SERVICES)
def without(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the whole package but the room of one service and its line."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "vlmpipe", tree / "vlmpipe", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tree / "vlmpipe/platforms" / request.param)
    lines = (tree / TABLE).read_text().splitlines(keepends=True)
    left = [line for line in lines if f"vlmpipe.platforms.{request.param}." not in line]
    assert len(left) == len(lines) - 1
    (tree / TABLE).write_text("".join(left))
    return tree


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_a_service_the_rest_imports_and_its_commands_run(without: Path) -> None:
    def python(*arguments: str) -> str:
        ended = subprocess.run(
            [sys.executable, *arguments],
            cwd=without,
            env=os.environ | {"PYTHONPATH": str(without)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert not ended.returncode, ended.stdout[-5000:]
        return ended.stdout

    assert int(python("-c", IMPORTS_ALL).split()[-1]) > 500
    config = str(ROOT / "configs/digits.yaml")
    assert "all fields are known" in python("-m", "vlmpipe", "check", config)
    assert "digits" in python("-m", "vlmpipe", "plan", config)
    compiled = python("-m", "vlmpipe", "compile", config, "--target", "local", "--output", "compiled")
    assert "digits.local.yaml" in compiled
    assert "constant: local" in (without / "compiled/digits.local.yaml").read_text()
    assert "No runs under" in python("-m", "vlmpipe", "runs", "list", "--root", "nothing")
