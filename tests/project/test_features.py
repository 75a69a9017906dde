"""The delete test: without a feature's room and its line in the table, the rest imports, type-checks and trains."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.trainer.runs import losses, make_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.hooks.table import FEATURES

TABLE = ROOT / "trainer/hooks/table.py"
STEPS = 3
MODULES = 1000  # that the product has at least
DIGITS = ROOT / "configs/digits.yaml"
RULES = sorted(ROOT.glob("trainer/features/*/rules.py"))
DRIVER = ROOT / "tests/support/drivers/without_features.py"
IMPORTS_ALL = """
import importlib, pkgutil, vlmpipe
names = [module.name for module in pkgutil.walk_packages(vlmpipe.__path__, "vlmpipe.")]
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


# Pattern of what asks for a feature outside its room, and how often it may at most: lower it with each place that goes.
PLACES = {
    "ema": (r"\bema_decay\b", 26),
    "float8": (r"\.float8\b", 31),
    "native_video": (r"\bNATIVE\b", 7),
    "preferences": (r"\b(in_pairs|has_reference|dpo_beta|simpo_beta|simpo_gamma)\b", 65),
    "quantized_base": (r"\bquantizes?_base\b", 30),
    "relevance": (r"\.relevance\b", 18),
    "router_loss": (r"\brouter_loss\b", 14),
}


def test_every_feature_has_a_limit_of_places() -> None:
    assert PLACES.keys() == FEATURES.keys()


@pytest.mark.parametrize("feature", FEATURES)
def test_what_asks_for_a_feature_outside_its_room_can_only_fall(feature: str) -> None:
    pattern, limit = PLACES[feature]
    places = {
        str(path.relative_to(ROOT)): number
        for path, text in sources().items()
        if not path.is_relative_to(room_of(feature)) and (number := len(re.findall(pattern, text)))
    }
    assert sum(places.values()) <= limit, f"use a hook of trainer/hooks (feature.py, rules.py): {places}"


def test_rules_of_features_import_no_torch() -> None:
    """They are asked of every run file, also by commands that have no torch."""
    modules = [".".join(("vlmpipe", *path.relative_to(ROOT).with_suffix("").parts)) for path in RULES]
    assert modules
    imports = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", imports], cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout == "False\n"
    )


def tree_without(features: Iterable[str], tree: Path) -> Path:
    """Make a tree of the product without the rooms and the lines of features; all else in it is links."""
    removed = {room_of(feature) for feature in features}
    lines = TABLE.read_text().splitlines(keepends=True)
    left = [line for line in lines if not any(FEATURES[feature] in line for feature in features)]
    assert len(left) == len(lines) - len(removed)
    link(ROOT / "vlmpipe", tree / "vlmpipe", {ROOT / "vlmpipe/trainer"})
    link(ROOT / "trainer", tree / "vlmpipe/trainer", {*removed, TABLE})
    (tree / "vlmpipe/trainer" / TABLE.relative_to(ROOT / "trainer")).write_text("".join(left))
    return tree


def link(source: Path, target: Path, removed: Collection[Path]) -> None:
    """Link a folder's entries, and make those folders that have something removed."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry in removed or entry.name == "__pycache__":
            continue
        if any(path.is_relative_to(entry) for path in removed):
            link(entry, target / entry.name, removed)
        else:
            (target / entry.name).symlink_to(entry)


def digits_run(root: Path, name: str) -> JobConfig:
    return make_run(root, name, {"train.max_steps": STEPS, "train.log_every_steps": 1}, features="off")


def run_in(tree: Path, *arguments: str, **environment: str) -> str:
    """Run Python with this tree's product. Returns what it printed; a failure shows it."""
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"} | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert not ended.returncode, ended.stdout[-5000:]
    return ended.stdout


def test_without_features_all_else_imports_plans_digits_and_trains_them(tmp_path: Path) -> None:
    """The short form, in one process: first without any feature, then with all but one."""
    tree, jobs = tree_without(FEATURES, tmp_path / "tree"), dict[str, JobConfig]()
    for feature in FEATURES:
        rooms = [room_of(other) for other in FEATURES if other != feature]
        (tree / "rooms" / feature).mkdir(parents=True)
        for room in rooms:
            (tree / "rooms" / feature / room.name).symlink_to(room)
        jobs[feature] = digits_run(tmp_path / "runs", feature)
    table = {name: [module, f"{jobs[name].run.run_uri}/run.json"] for name, module in FEATURES.items()}
    output = run_in(tree, str(DRIVER), str(tree), str(DIGITS), json.dumps(table))
    assert int(output.split()[0]) > MODULES
    assert {len(losses(job)) for job in jobs.values()} == {STEPS}
    assert len({tuple(losses(job)) for job in jobs.values()}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_without_a_feature_all_else_imports_plans_trains_and_type_checks(
    feature: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tree = tree_without([feature], tmp_path / "tree")
    assert int(run_in(tree, "-c", IMPORTS_ALL).split()[-1]) > MODULES
    for command in "check", "plan":
        run_in(tree, "-m", "vlmpipe", command, str(DIGITS))
    job = digits_run(tmp_path / "runs", "digits")
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    run_in(tree, "-m", "vlmpipe.trainer.train", "--config", f"{job.run.run_uri}/run.json", **ranks, MASTER_PORT="0")
    assert len(losses(job)) == STEPS
    config = f"--config-file={ROOT / 'pyproject.toml'}"
    cache = str(tmp_path_factory.getbasetemp() / "mypy")  # of all features: torch's types alone take a minute
    assert "Success" in run_in(tree, "-m", "mypy", config, "--cache-dir", cache, "-p", "vlmpipe")


def test_nothing_asks_whether_a_family_is_that_of_transformers_own_code() -> None:
    """`PUBLISHED_FAMILIES`, or a method of the family, answers for a second such family too."""
    asks = re.compile(r"""\bfamily (==|!=) ["']hf["']""")
    assert not [path for path, text in sources().items() if asks.search(text)]
