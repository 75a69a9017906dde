"""Recipes of other trainers, each in its own environment: two processes train, and the model passes its gate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.wheel import START

RUN_FILES = [path for path in sorted(ROOT.glob("recipes/*/*.yaml")) if (path.parent / "requirements.txt").is_file()]
OWN_ENVIRONMENT = {path.parent.name for path in RUN_FILES}
RUN_FILES += [ROOT / "recipes" / name for name in ("plain/run.yaml", "plain/package.yaml", "parameter-server/run.yaml")]
CASES = [pytest.param(path, id=f"{path.parent.name}-{path.stem}") for path in RUN_FILES if path.name != "train.yaml"]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("run_file", CASES)
def test_recipe_trains_a_model_that_passes_its_gate(run_file: Path, tmp_path: Path) -> None:
    name = run_file.parent.name
    if name in OWN_ENVIRONMENT and not (ROOT / "build/recipes" / name / ".installed").is_file():
        pytest.skip(f"make recipe-{name} makes its environment")
    if (
        "tiny-qwen2-5-vl" in run_file.read_text(encoding="utf-8")
        and not (ROOT / "build/recipes/tiny-qwen2-5-vl/config.json").is_file()
    ):
        pytest.skip("make build/recipes/tiny-qwen2-5-vl/config.json makes its base model")
    command = [sys.executable, "-c", START, "run", str(run_file), "--run-id", "one"]
    done = subprocess.run(
        [*command, f"output.root_uri={tmp_path}"], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "runs/one"
    assert json.loads((run / "decision.json").read_text())["accepted"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == json.loads((run / "run.json").read_text())["train"]["max_steps"]
