"""Where tests lie: unit tests mirror the modules, helpers are shared from one place, and benchmarks have their own."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from pathlib import Path

import pytest

import vlmpipe
from tests.support.paths import ROOT
from vlmpipe.components.runtime.parameters import PARAMETERS
from vlmpipe.job_spec.order import JobOrder

TESTS = ROOT / "tests"
PACKAGES = ("vlmpipe", "pipelines", "components", "trainer", "benchmarks")
# What these say holds for several modules of their folder.
LAWS_OF_A_FOLDER = {
    "trainer/config/test_section_values.py",
    "trainer/data/prepare/chunks/test_reuse.py",
    "trainer/data/prepare/test_mutations.py",
    "trainer/data/prepare/test_reduced_jpegs.py",
    "trainer/data/sources/test_containers.py",
    "trainer/data/sources/test_damaged_tables.py",
    "trainer/data/sources/test_formats.py",
    "trainer/data/sources/test_special_files.py",
    "trainer/data/sources/test_stand_ins.py",
    "trainer/models/attention/test_block_mask.py",
    "trainer/models/attention/test_image_blocks.py",
    "trainer/models/attention/test_prefixes.py",
    "trainer/models/test_host_synchronization.py",
    "vlmpipe/cli/test_silent_services.py",
    "vlmpipe/config/test_run_file_fuzz.py",
    "vlmpipe/job_spec/test_run_file_keys.py",
    "vlmpipe/runs/test_special_files.py",
}


ASKED_FOR = re.compile(r"\b(tests\.([a-z_0-9]+\.)*test_|benchmarks\b)")
MODULES_A_ROOM = 15  # the most that one finds the way among
# Names that say nothing of a module's subject. base is the one Protocol or section type that a room's others extend.
NAMES_WITHOUT_A_SUBJECT = {
    "utils", "util", "common", "misc", "helpers", "helper", "parts", "stored", "examine", "make", "step_logic", "kept",
}  # fmt: skip
MAX_LINES = 400  # of a file; a longer one has a second subject that can move out
# KFP makes a step of the source of its function, so that a step that takes them lists them again; tests compare both.
LISTS = {
    "parameters": (
        {parameter.name for parameter in PARAMETERS},
        {"components/runtime/parameters.py: a sequence", "components/resolve_run.py: resolve_run"},
    ),
    "inputs of a job": (
        {field.name for field in dataclasses.fields(JobOrder)},
        {
            "vlmpipe/job_spec/order.py: JobOrder",
            "vlmpipe/job_spec/build.py: a call",  # the values that a run file gives them
            "vlmpipe/platforms/job_step.py: run_custom_job",
            "vlmpipe/job_spec/forms.py: CustomJobSpec",  # the API's own form, by which a request becomes a spec
            "vlmpipe/config/sections/gcp.py: GcpConfig",  # fields of the run file
            "vlmpipe/importing/job_specs/form.py: a sequence",  # what files of others say
            "vlmpipe/importing/listings/python_listing.py: a sequence",
        },
    ),
}
MIN_LISTED = 7  # names in one place that make it a list of them


@functools.cache
def _modules() -> list[Path]:
    return [path.relative_to(TESTS) for path in TESTS.rglob("*.py")]


@functools.cache
def _imported(path: Path) -> set[str]:
    """The modules that a file under `tests` imports from; none where no text is of one that the laws below ask for."""
    text = (TESTS / path).read_text()
    nodes = list(ast.walk(ast.parse(text))) if ASKED_FOR.search(text) else []
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return named | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_a_unit_test_mirrors_a_module_or_a_package() -> None:
    alone = set()
    for place in (path.relative_to("unit") for path in _modules() if path.parts[0] == "unit"):
        subject = ROOT / place.parent / place.stem.removeprefix("test_")
        if place.name.startswith("test_") and not (subject.with_suffix(".py").is_file() or subject.is_dir()):
            alone.add(str(place))
    assert alone <= LAWS_OF_A_FOLDER


def test_nothing_is_imported_from_a_test_module() -> None:
    """Helpers are in tests/support and tests/fakes, and programs of their own beside the tests that start them."""
    found = {
        f"{path}: {name}"
        for path in _modules()
        for name in _imported(path)
        if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")
    }
    assert found == set()


def test_only_tests_of_benchmarks_import_them() -> None:
    found = {
        str(path)
        for path in _modules()
        if "benchmarks" not in path.parts and any(name.split(".")[0] == "benchmarks" for name in _imported(path))
    }
    assert found <= {"support/drivers/train_alone.py"}, "of tests/integration/benchmarks/test_gpu.py"


def test_no_room_holds_more_than_fifteen_modules() -> None:
    rooms = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    counts = {room.relative_to(ROOT): sum(1 for path in room.glob("*.py") if path.stem != "__init__") for room in rooms}
    assert len(counts) > 50
    assert {room: count for room, count in counts.items() if count > MODULES_A_ROOM} == {}


def test_every_module_is_named_by_its_subject() -> None:
    paths = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).resolve().rglob("*.py")]
    assert {path for path in paths if NAMES_WITHOUT_A_SUBJECT & {*path.parts, path.stem}} == set()
    assert {path for path in paths if "base" in path.parts} == set(), "a module of a room, not a room"


def test_no_room_has_the_name_of_a_function_of_the_python_api() -> None:
    """Importing the room would put it in the function's place: `vlmpipe.compare(...)` worked once, and then no more."""
    rooms = {path.stem for path in (ROOT / "vlmpipe").iterdir() if path.suffix in ("", ".py")}
    assert "comparison" in rooms and set(vlmpipe.__all__) & rooms == set()


def test_no_file_of_the_product_has_more_than_400_lines() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).resolve().rglob("*.py")]
    assert len(paths) > 500
    counts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in paths}
    assert {path: count for path, count in counts.items() if count > MAX_LINES} == {}


def _listed(node: ast.AST) -> tuple[str, set[object]]:
    """The kind of list that a node is and the names in it: of a function, a class, a call, a mapping or a sequence."""
    if isinstance(node, ast.FunctionDef):
        return node.name, {name.arg for name in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]}
    if isinstance(node, ast.ClassDef):
        fields = [field.target for field in node.body if isinstance(field, ast.AnnAssign)]
        return node.name, {field.id for field in fields if isinstance(field, ast.Name)}
    if isinstance(node, ast.Call):
        return "a call", {keyword.arg for keyword in node.keywords}
    items: list[ast.expr | None] = []
    if isinstance(node, ast.Dict):
        items = list(node.keys)
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        items = [item.args[0] if isinstance(item, ast.Call) and item.args else item for item in node.elts]
    kind = "a mapping" if isinstance(node, ast.Dict) else "a sequence"
    return kind, {item.value for item in items if isinstance(item, ast.Constant)}


@pytest.mark.parametrize("subject", LISTS)
def test_the_names_of_a_table_are_listed_once(subject: str) -> None:
    names, places = LISTS[subject]
    listed = {
        f"{path.relative_to(ROOT)}: {kind}"
        for package in ("vlmpipe", "pipelines", "components", "trainer")
        for path in (ROOT / package).rglob("*.py")
        if not any(part.is_symlink() for part in path.parents)
        for kind, members in map(_listed, ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        if len(names & members) >= MIN_LISTED
    }
    assert listed == places


@pytest.mark.parametrize(
    "source",
    [
        "def run(epochs, seed, *, resume): ...",
        "class Defaults:\n    epochs: int\n    seed: int\n    resume: str\n",
        "run(epochs=epochs, seed=seed, resume=resume)",
        "{'epochs': 1, 'seed': 2, 'resume': 'auto'}",
        "['epochs', 'seed', 'resume']",
        "(Parameter('epochs', int), Parameter('seed', int), Parameter('resume', str))",
    ],
)
def test_each_way_to_list_names_is_seen(source: str) -> None:
    names = {"epochs", "seed", "resume"}
    assert any(names <= _listed(node)[1] for node in ast.walk(ast.parse(source)))
