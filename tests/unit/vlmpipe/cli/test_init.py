"""Pages and run files of the package, which a user without a clone has too, and run files for data."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_line import Vlmpipe
from tests.support.data.photo_folders import as_class_folders, as_other_columns
from tests.support.paths import ROOT
from vlmpipe import api
from vlmpipe.cli.examples import EXAMPLES
from vlmpipe.cli.init import FILES, Template
from vlmpipe.config.run_config import load_run_file
from vlmpipe.config.yaml_loader import shipped

PRODUCT = ("vlmpipe", "trainer", "pipelines", "components")
LINKS = {"trainer", "pipelines", "components", "run_files", "guides"}
PAGE = re.compile(r"vlmpipe docs ([a-z0-9-]+)")
FILE_OF_CLONE = re.compile(r"docs/(?:how-to/|reference/)?[a-z0-9-]+\.md")


def texts(path: Path) -> Iterator[str]:
    """Texts of a module that may name a page, without its docstrings. Those of commands are their help, and count."""
    source = path.read_text(encoding="utf-8")
    if "docs" not in source:
        return
    tree = ast.parse(source)
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [node.body[0].value for node in ast.walk(tree) if isinstance(node, described) and _has_docstring(node)]
    hidden = set() if path.parent.name == "cli" else set(map(id, docstrings))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in hidden:
            yield node.value


def _has_docstring(node: ast.AST) -> bool:
    return bool(ast.get_docstring(node))  # type: ignore[arg-type]


def modules() -> Iterator[Path]:
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*.py"):
            if package != "vlmpipe" or path.relative_to(ROOT / package).parts[0] not in LINKS:
                yield path


@pytest.mark.usefixtures("no_garbage_collection")
def test_no_message_points_at_a_file_of_the_clone_and_every_page_exists() -> None:
    pages = {path.stem for folder in (".", "how-to", "reference") for path in (ROOT / "docs" / folder).glob("*.md")}
    named = {(path, text) for path in modules() for text in texts(path)}
    found = [f"{path.relative_to(ROOT)}: {text[:80]}" for path, text in named if FILE_OF_CLONE.search(text)]
    allowed = ("kfp_components.py", "json_schema.py", "api.py", "python_api")
    assert [one for one in found if not one.partition(":")[0].endswith(allowed)] == []
    pointed = {page for _, text in named for page in PAGE.findall(text)}
    assert len(pointed) > 5 and pointed <= pages


def test_pages_are_listed_and_printed(vlmpipe: Vlmpipe) -> None:
    listed = vlmpipe("docs").out
    assert "how-to/compare-runs" in listed and "decisions" not in listed
    page = (ROOT / "docs/how-to/compare-runs.md").read_text(encoding="utf-8")
    for name in ("compare-runs", "how-to/compare-runs", "docs/how-to/compare-runs.md"):
        assert vlmpipe("docs", name).out == page


@pytest.mark.parametrize(
    ("name", "said"),
    [("compare-run", "did you mean compare-runs"), ("python-api", "how-to/python-api or reference/python-api")],
)
def test_a_page_that_is_not_one_is_a_sentence(vlmpipe: Vlmpipe, name: str, said: str) -> None:
    answer = vlmpipe("docs", name)
    assert answer.code == 64 and said in answer.err


def test_run_files_of_examples_are_there_without_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = {word for lines in EXAMPLES.values() for line in lines for word in line.split() if "configs/" in word}
    files = {name for name in named if "*" not in name}
    assert len(files) >= 4 and all(shipped(Path(name)) for name in files)
    assert shipped(Path("configs/absent.yaml")) is None and shipped(Path("mine/digits.yaml")) is None
    Path("configs").mkdir()
    Path("configs/digits.yaml").touch()
    assert shipped(Path("configs/digits.yaml")) is None, "a file that is here"


def test_every_template_is_a_shipped_run_file_and_every_flagship_has_one(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    for template, (name, following) in FILES.items():
        answer = vlmpipe("init", template.value, "--output", str(tmp_path / name))
        assert answer.code == 0 and following.format(path=tmp_path / name) in answer.out
        assert load_run_file(tmp_path / name) == load_run_file(ROOT / "configs" / name)
    table = (ROOT / "docs/reference/shipped-run-files.md").read_text(encoding="utf-8")
    named = dict(re.findall(r"^\| \[configs/([\w-]+\.yaml)\].* \| `([\w-]+)` \|$", table, re.M))
    assert len(named) == 6 and named == {FILES[Template(one)][0]: one for one in named.values()}


def test_a_run_file_and_its_table_are_written_and_nothing_is_overwritten(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    place, path = as_class_folders(tmp_path / "things"), tmp_path / "things.yaml"
    answer = vlmpipe("init", "--data", str(place), "--output", str(path))
    assert answer.code == 0 and "a folder of images for each answer" in answer.out
    assert f"{tmp_path}/things-data.csv written, 12 rows" in " ".join(answer.out.split())
    again = vlmpipe("init", "--data", str(place), "--output", str(path))
    assert again.code == 64 and "exists already" in again.err
    path.unlink()
    again = vlmpipe("init", "--data", str(place), "--output", str(path))
    assert again.code == 64 and "things-data.csv exists already" in again.err and not path.exists()
    assert vlmpipe("init", "llava", "--data", str(place)).code == 64


@pytest.mark.slow
def test_the_file_passes_check_and_its_run_trains(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    place, path = as_other_columns(tmp_path / "things"), tmp_path / "things.yaml"
    vlmpipe("init", "--data", str(place), "--output", str(path))
    findings = api.check(load_run_file(path, [f"output.root_uri={tmp_path}/runs"]))
    assert [one.text for one in findings if one.state == "failed"] == []
    answer = vlmpipe("run", str(path), "train.max_steps=2", f"output.root_uri={tmp_path}/runs", "--plain")
    assert answer.code == 0 and "Done in" in answer.out


def test_data_of_a_bucket_is_refused_before_anything_is_looked_at(
    vlmpipe: Vlmpipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos.yaml").touch()
    answer = vlmpipe("init", "--data", "gs://bucket/photos")
    assert answer.code == 64 and "is not on this machine" in answer.err
