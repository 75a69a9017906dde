"""The wheel without its extras, or with some of them: commands that lack a package end in a sentence that names the
extra. Environments hold what pip would install, linked from this one."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.support.environments import linked_environment
from tests.support.paths import ROOT
from tests.support.short_form import chosen
from tests.support.wheel import START, build_wheel, python_with, shared_install
from vlmpipe.trainer.errors import ExitCode


@dataclass(frozen=True)
class Lack:
    """A command in an environment with some extras, and the extras that its sentence must name."""

    extras: str
    command: str
    named: str
    slow: bool = False

    def __str__(self) -> str:
        return f"[{self.extras}] {self.command}"


WHOLE_TOOL = "pipelines,trainer,data"
LACKS = {
    str(lack): lack
    for lack in [
        *(Lack("", command, WHOLE_TOOL) for command in ("", "--help", "init", "check a.yaml", "run a.yaml")),
        *(Lack("pipelines", f"{command} digits.yaml", "trainer", slow=True) for command in ("check", "plan", "run")),
        Lack("trainer", "run digits.yaml", "pipelines", slow=True),
        Lack("data", "check digits.yaml", WHOLE_TOOL, slow=True),
        Lack("wandb", "check digits.yaml", WHOLE_TOOL, slow=True),
        *(Lack("pipelines,trainer", f"{command} digits.yaml", "data", slow=True) for command in ("check", "run")),
    ]
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Python of an environment that holds the wheel with some extras, and nothing else."""
    installed = shared_install(tmp_path_factory)
    (wheel,) = (found for found in distributions(path=[str(installed)]) if found.name == "vlmpipe")

    @functools.cache
    def with_extras(extras: str) -> Path:
        return linked_environment(tmp_path_factory.mktemp("environment"), wheel, extras)

    return with_extras


def in_environment(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([python, *arguments], cwd=folder, env=variables, capture_output=True, text=True)


@pytest.mark.parametrize("name", chosen(LACKS, lambda name: not LACKS[name].slow))
def test_a_command_without_its_extra_ends_in_a_sentence_that_names_it(
    name: str, environment: Callable[[str], Path], tmp_path: Path
) -> None:
    lack = LACKS[name]
    shutil.copy(ROOT / "configs/digits.yaml", tmp_path)
    answer = in_environment(environment(lack.extras), tmp_path, "-c", START, *lack.command.split())
    assert answer.returncode == ExitCode.UNAVAILABLE, answer.stdout + answer.stderr
    said = answer.stdout + answer.stderr
    assert "is not installed" in said and f"pip install 'vlmpipe[{lack.named}]'" in said
    assert "Traceback" not in said
    assert lack.named == "data" or not (tmp_path / "runs").exists(), "no run was started"


def test_the_bare_package_is_imported_and_its_api_names_the_extra(
    environment: Callable[[str], Path], tmp_path: Path
) -> None:
    assert in_environment(environment(""), tmp_path, "-c", "import vlmpipe").returncode == 0
    answer = in_environment(environment(""), tmp_path, "-c", "from vlmpipe.kfp_components import prepare_data")
    assert answer.returncode == 1, "an import that fails is an ImportError, as everywhere in Python"
    last = "MissingPackageError: the Python package kfp is not installed"
    assert last in answer.stderr and answer.stderr.endswith("pip install 'vlmpipe[pipelines]'\n")


@pytest.mark.slow
def test_the_commands_that_need_one_extra_work_with_it_alone(
    environment: Callable[[str], Path], tmp_path: Path
) -> None:
    python = environment("pipelines")
    for command in ("--help", "init digits", "compile digits.yaml --target local", "rehearse --help"):
        answer = in_environment(python, tmp_path, "-c", START, *command.split())
        assert answer.returncode == 0, command + answer.stdout + answer.stderr


@pytest.mark.slow
def test_pip_installs_the_wheel_into_an_empty_environment(tmp_path: Path) -> None:
    """With what pip resolves from its index today; the other tests link the packages of this environment."""
    built = build_wheel(tmp_path)
    venv.EnvBuilder(with_pip=True).create(tmp_path / "venv")
    pip = [tmp_path / "venv/bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run([*pip, "install", "--retries", "0", str(built)], capture_output=True, text=True)
    if done.returncode and re.search("No matching distribution|ConnectionError|Max retries", done.stderr):
        pytest.skip("no package index")
    assert done.returncode == 0, done.stderr
    answer = subprocess.run([tmp_path / "venv/bin/vlmpipe", "run"], cwd=tmp_path, capture_output=True, text=True)
    assert answer.returncode == ExitCode.UNAVAILABLE
    assert f"pip install 'vlmpipe[{WHOLE_TOOL}]'" in answer.stderr and "Traceback" not in answer.stderr


def test_an_older_python_is_refused_at_once(tmp_path: Path) -> None:
    """Before any module is imported that it could not read. pip refuses to install the wheel there."""
    before = "import sys; sys.version_info = (3, 10, 0, 'final', 0); "
    answer = python_with(ROOT, tmp_path, "-c", before + "import vlmpipe.cli.entry")
    assert (answer.returncode, answer.stdout) == (ExitCode.UNAVAILABLE, "")
    assert answer.stderr == "error: this is Python 3.10\n  expected: Python 3.11 or newer\n"


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.8", "3.10"])
def test_a_real_older_python_is_refused_at_once(version: str, tmp_path: Path) -> None:
    older = older_python(version)
    if older is None:
        pytest.skip(f"no Python {version} here")
    started = time.monotonic()
    answer = subprocess.run(
        [older, "-c", "import vlmpipe.cli.entry"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert answer.returncode == ExitCode.UNAVAILABLE
    assert answer.stderr == f"error: this is Python {version}\n  expected: Python 3.11 or newer\n"
    assert time.monotonic() - started < 5  # a fraction of a second on a quiet machine


def older_python(version: str) -> Path | None:
    """One of this machine: on PATH (not a shim that chooses another), or one of pyenv's."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    on_path = shutil.which(f"python{version}")
    if on_path and "shims" not in Path(on_path).parts:
        found.append(Path(on_path))
    return found[0] if found else None
