"""vlmpipe as a wheel installs it, without the clone."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FOLDERS = ("pipelines", "components", "trainer")  # at the top of the repository, in the wheel below vlmpipe/
START = "import sys; sys.argv[0] = 'vlmpipe'; from vlmpipe.cli.entry import console; console()"


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of its sources."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in ("vlmpipe", *FOLDERS, "configs", "docs", "pyproject.toml", "README.md", "LICENSE"):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(source)]
    subprocess.run([*PIP, "wheel", *options, str(source)], check=True)
    (built,) = source.glob("*.whl")
    return built


def install_wheel(folder: Path) -> Path:
    """Build and install the wheel. Returns the folder that holds what it installs."""
    built, target = build_wheel(folder), folder / "installed"
    options = ["--no-deps", "--no-index", "--no-compile", "--target", str(target)]  # most modules are never imported
    subprocess.run([*PIP, "install", *options, str(built)], check=True)
    return target


def shared_install(folders: pytest.TempPathFactory) -> Path:
    """What `install_wheel` returns, made once for all workers of a test run. Nobody may write into it."""
    own = folders.getbasetemp()
    root = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, done = root / "shared-wheel", root / "shared-wheel.done"
    with open(root / "shared-wheel.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that was killed
            folder.mkdir()
            done.write_text(str(install_wheel(folder / "wheel")))
    return Path(done.read_text())


def shadowing_packages(folder: Path) -> None:
    """A user's own packages with the names of our folders."""
    for name in FOLDERS:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("")
        (folder / name / "task.py").write_text(f"NAME = 'the user\\'s own {name}'\n")


def run_installed(
    installed: Path, folder: Path, *arguments: str, before: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """The `vlmpipe` of the wheel, in a folder."""
    return python_with(installed, folder, "-c", before + START, *arguments, **environment)


def python_with(
    installed: Path, folder: Path, *arguments: str, typed: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder with the wheel. typed: lines for an interpreter that reads them one after another."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **environment, "PYTHONPATH": str(installed)},
        input=typed,
        capture_output=True,
        text=True,
    )
