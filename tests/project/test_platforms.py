"""A platform is a room and a line of a table: nobody else asks for its name, its classes or its modules."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vlmpipe.platforms.base import Platform
from vlmpipe.platforms.table import PLATFORMS, platform_of

ROOM = ROOT / "vlmpipe/platforms"
PACKAGES = ("vlmpipe", "pipelines", "components")
GOOGLE = "asks Google Cloud about what the run file names, whatever platform runs it"
ALONE = "starts a custom job without a pipeline, which only a platform with takes_jobs does"
OUTSIDE = {
    "vlmpipe/api.py": "vlmpipe.run starts the pipeline as processes of this machine",
    "vlmpipe/cli/app.py": "names the variable of Vertex AI's endpoint in the help",
    "vlmpipe/cli/init.py": "a template of run files has the name of a platform",
    "vlmpipe/cli/tune.py": "tune runs trials here, or sends a HyperparameterTuningJob",
    "vlmpipe/doctor/addresses.py": GOOGLE,
    "vlmpipe/doctor/google_api.py": GOOGLE,
    "vlmpipe/access/needs.py": "a kind of address, not a platform",
    "vlmpipe/registry/vertex.py": "a registry is chosen by its address: a run on this machine may register in vertex://",
    "vlmpipe/rehearsal/serve.py": "plays Vertex AI itself",
    "pipelines/check.py": "says of each run file whether it runs here and on Vertex AI",
    "pipelines/checks/vertex_look.py": "the part of check about Vertex AI",
    "pipelines/submit_job.py": ALONE,
    "pipelines/submit_probe.py": ALONE,
    "pipelines/tune/search.py": "tune runs trials here, or sends a HyperparameterTuningJob",
    "components/runtime/vertex_experiments.py": "logs a run to a Vertex AI experiment, from the records of its steps",
}


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
        "def f():\n    from vlmpipe.google_cloud.client import Place",
        "import vlmpipe.google_cloud.client as client",
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
