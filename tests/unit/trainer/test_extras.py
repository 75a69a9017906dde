"""Packages by extra, and the sentence when one is missing."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vlmpipe.trainer.errors import ExitCode, MissingPackageError, missing_packages
from vlmpipe.trainer.extras import MODULES_OF_EXTRAS, extra_of

MODULES = {
    "kfp-kubernetes": "kfp",
    "nvidia-ml-py": "pynvml",
    "pillow": "PIL",
    "scikit-learn": "sklearn",
}  # of packages that are not named like their module
FOLDERS = ("vlmpipe", "trainer", "pipelines", "components")
WITHOUT_EXTRAS = {"annotated_types", "google_crc32c", "pydantic", "pydantic_core", "vlmpipe", "yaml"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def module_of(requirement: str) -> str:
    """The top-level module of a package."""
    name = re.split(r"[<>=\[]", requirement)[0]
    if name.startswith("google-cloud-") and name != "google-cloud-pipeline-components":
        return "google"
    return MODULES.get(name, name.replace("-", "_"))


def imported(path: Path) -> Iterator[str]:
    """Top-level modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]


def test_every_package_that_the_product_imports_is_there_without_extras_or_leads_to_one() -> None:
    files = {path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    of_no_extra = {
        (module, path.relative_to(ROOT).as_posix())
        for path in files
        for module in imported(path)
        if module not in sys.stdlib_module_names | WITHOUT_EXTRAS and not extra_of(module)
    }
    assert len(files) > 500 and not of_no_extra


@pytest.mark.parametrize("extra", ["pipelines", "trainer", "data", "wandb"])
def test_every_package_of_an_extra_leads_to_it(extra: str) -> None:
    for requirement in EXTRAS[extra]:
        assert extra in extra_of(module_of(requirement)).split(","), requirement


def test_every_extra_that_is_named_exists() -> None:
    assert {extra for named in MODULES_OF_EXTRAS for extra in named.split(",")} <= EXTRAS.keys()


def test_a_missing_package_is_an_import_error_that_names_its_extra() -> None:
    with pytest.raises(ImportError, match=r"pip install 'vlmpipe\[trainer\]'") as caught, missing_packages():
        raise ModuleNotFoundError("No module named 'torch'", name="torch.nn")
    assert isinstance(caught.value, MissingPackageError)
    assert caught.value.code == ExitCode.UNAVAILABLE
    assert caught.value.found == "the Python package torch is not installed"


def test_a_module_of_no_extra_stays_an_unexpected_error() -> None:
    with pytest.raises(ModuleNotFoundError) as caught, missing_packages():
        raise ModuleNotFoundError("No module named 'typo'", name="typo")
    assert not isinstance(caught.value, MissingPackageError)
