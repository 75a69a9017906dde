"""The delete test: without a feature's room and its line in the table, the rest imports, type-checks and trains."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.trainer.runs import losses, make_run
from vlmpipe.trainer.hooks.table import FEATURES

TABLE = ROOT / "trainer/hooks/table.py"
STEPS = 3
IMPORTS_ALL = """
import importlib, pkgutil, vlmpipe.trainer
names = [found.name for found in pkgutil.walk_packages(vlmpipe.trainer.__path__, "vlmpipe.trainer.")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def room_of(feature: str) -> Path:
    """The folder of the feature's module."""
    return ROOT / Path(*FEATURES[feature].split(".")[1:-1])


@functools.cache
def sources() -> dict[Path, str]:
    """Text of each module of the product."""
    packages = ("trainer", "vlmpipe", "pipelines", "components")
    return {path: path.read_text() for package in packages for path in (ROOT / package).rglob("*.py")}


@pytest.mark.parametrize("feature", FEATURES)
def test_nothing_names_a_features_room_but_its_line_of_the_table(feature: str) -> None:
    room = room_of(feature)
    assert room.is_dir() and room.parent.name in ("features", "models")
    package = ".".join(("vlmpipe", *room.relative_to(ROOT).parts))
    naming = {
        path.relative_to(ROOT): text.count(package)
        for path, text in sources().items()
        if not path.is_relative_to(room) and package in text
    }
    assert naming == {TABLE.relative_to(ROOT): 1}


@pytest.fixture(params=FEATURES)
def without(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a trainer that lacks one feature, as `vlmpipe.trainer`."""
    feature, trainer = request.param, tmp_path / "tree/vlmpipe/trainer"
    trainer.parent.mkdir(parents=True)
    (trainer.parent / "__init__.py").touch()
    shutil.copytree(ROOT / "trainer", trainer, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(trainer / room_of(feature).relative_to(ROOT / "trainer"))
    table = trainer / TABLE.relative_to(ROOT / "trainer")
    lines = table.read_text().splitlines(keepends=True)
    left = [line for line in lines if FEATURES[feature] not in line]
    assert len(left) == len(lines) - 1
    table.write_text("".join(left))
    return tmp_path / "tree"


def run_in(tree: Path, *arguments: str, **environment: str) -> str:
    """Run Python with this tree's trainer. Returns what it printed; a failure shows it."""
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)} | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert not ended.returncode, ended.stdout[-5000:]
    return ended.stdout


@pytest.mark.slow
def test_a_trainer_without_a_feature_imports_trains_and_type_checks(
    without: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert int(run_in(without, "-c", IMPORTS_ALL).split()[-1]) > 100
    job = make_run(tmp_path / "runs", "digits", {"train.max_steps": STEPS, "train.log_every_steps": 1}, features="off")
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    run_in(without, "-m", "vlmpipe.trainer.train", "--config", f"{job.run.run_uri}/run.json", **ranks, MASTER_PORT="0")
    assert len(losses(job)) == STEPS
    config = f"--config-file={ROOT / 'pyproject.toml'}"
    cache = str(tmp_path_factory.getbasetemp() / "mypy")  # of all features: torch's types alone take a minute
    assert "Success" in run_in(without, "-m", "mypy", config, "--cache-dir", cache, "vlmpipe")


def test_nothing_asks_whether_a_family_is_that_of_transformers_own_code() -> None:
    """`PUBLISHED_FAMILIES`, or a method of the family, answers for a second such family too."""
    asks = re.compile(r"""\bfamily (==|!=) ["']hf["']""")
    assert not [path for path, text in sources().items() if asks.search(text)]
