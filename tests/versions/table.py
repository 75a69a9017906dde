"""vlmpipe with other versions of Python and of what it depends on (make test-versions).

python -m tests.versions.table [--python 3.12] [--torch-backend cpu]

A row is one interpreter, in an environment of its own, with the versions that pyproject.toml allows for what vlmpipe
itself imports: the lowest with the oldest interpreter, the newest with the others, since a release made before an
interpreter often has no wheel for it. It runs the quickstart in its short form and laws that take seconds. Rows whose
interpreter is not on this machine are left out, and the table says so. Needs a package index and `uv`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

EXTRAS = ("pipelines", "trainer", "data")  # what `make install` has
# Beside them, what the laws import; of what pyproject.toml has in other extras, in its versions.
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis", "webdataset", "boto3", "bitsandbytes", "kubeflow-trainer-api")
# Run files, the compiled graph, the optimizer's steps, checkpoints, and one process beside two.
LAWS = (
    "tests/unit/vlmpipe/config", "tests/unit/trainer/optimizer", "tests/unit/trainer/checkpoint",
    "tests/unit/trainer/dataloading", "tests/unit/pipelines",
    "tests/integration/trainer/strategies/test_numeric_equality.py",
)  # fmt: skip
QUICKSTART = ("train.max_steps=30", "evaluate.max_samples=60", "data.max_samples=600")
LIMIT_S = 3600
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))


class RowFailedError(Exception):
    """What a step of a row printed."""


@dataclass(frozen=True)
class Row:
    python: str
    resolution: str  # of uv


ROWS = (Row("3.11", "lowest-direct"), Row("3.12", "highest"), Row("3.13", "highest"))


def interpreter(python: str) -> str:
    """The path of that Python on this machine, or nothing. Also of pyenv, whose own commands may lead nowhere."""
    candidates = [shutil.which(f"python{python}"), *sorted(PYENV.glob(f"versions/{python}.*/bin/python"))]
    return next((str(path) for path in candidates if path and _runs(Path(path))), "")


def _runs(path: Path) -> bool:
    return subprocess.run([path, "-c", ""], capture_output=True).returncode == 0


def resolved(row: Row, uv: str, folder: Path) -> Path:
    """Resolve the row's versions into a requirements file."""
    requirements = folder / "requirements.txt"
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    of_row = ["--resolution", row.resolution, "--python-version", row.python]
    _run([uv, "pip", "compile", "--quiet", "pyproject.toml", *extras, *of_row, "--output-file", str(requirements)])
    return requirements


def install(row: Row, uv: str, folder: Path, torch_backend: str) -> Path:
    """An environment of the row's versions with vlmpipe in it, and pytest. Returns its Python."""
    requirements, environment = resolved(row, uv, folder), folder / "environment"
    python = environment / "bin/python"
    backend = ["--torch-backend", torch_backend] if torch_backend else []
    _run([uv, "venv", "--quiet", "--python", interpreter(row.python), str(environment)])
    into = [uv, "pip", "install", "--quiet", "--python", str(python)]
    _run([*into, *backend, "--requirement", str(requirements)])
    _run([*into, *backend, "--constraint", str(requirements), *TEST_TOOLS])
    _run([*into, "--no-deps", "."])
    return python


def quickstart(python: Path, folder: Path) -> None:
    """The whole graph with a model that is hardly trained, which its gate refuses."""
    settings = [f"output.root_uri={folder / 'root'}", *QUICKSTART]
    command = [str(python.with_name("vlmpipe")), "run", str(ROOT / "configs/digits.yaml"), *settings]
    _run(command, cwd=folder)


def laws(python: Path, folder: Path) -> None:
    _run([str(python), "-m", "pytest", "-q", "--show-capture=no", "-p", "no:cacheprovider", *LAWS])


STEPS: dict[str, Callable[[Path, Path], None]] = {"quickstart": quickstart, "laws": laws}


def _run(command: Sequence[str], *, cwd: Path = ROOT) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        said = f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
        raise RowFailedError(f"{' '.join(command[:4])} … ended with {done.returncode}\n{said}")


def tried(row: Row, uv: str, torch_backend: str) -> tuple[bool, str]:
    """Whether all of the row passed, and a line about it."""
    if not interpreter(row.python):
        return True, f"left out: there is no python{row.python} on this machine"
    started_s, at = time.monotonic(), "install"
    with tempfile.TemporaryDirectory(prefix="vlmpipe-versions-") as folder:
        try:
            python = install(row, uv, Path(folder), torch_backend)
            for name, step in STEPS.items():
                at = name
                step(python, Path(folder))
        except RowFailedError as error:
            print(error, flush=True)
            return False, f"failed: {at}"
    return True, f"passed in {time.monotonic() - started_s:.0f} s: {', '.join(STEPS)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", choices=[row.python for row in ROWS], help="the row of one interpreter")
    parser.add_argument("--torch-backend", default="cpu", help="uv's name of a build; '' takes the index's")
    given = parser.parse_args(arguments)
    uv = shutil.which("uv")
    if not uv:
        sys.exit("uv is not on the PATH; expected the tool that resolves versions; fix: pip install uv")
    failed = False
    for row in ROWS:
        if given.python not in (None, row.python):
            continue
        passed, said = tried(row, uv, given.torch_backend)
        failed = failed or not passed
        print(f"Python {row.python}  {row.resolution:<14} {said}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
