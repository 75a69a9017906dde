"""What a command that is run again repeats: its plan and its data, both found without torch, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.analysed_models import forget_analyses
from tests.support.paths import ROOT
from tests.support.trainer.runs import make_run
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.plan import plan_run

AGAIN = """
import json, sys
from pathlib import Path
from vlmpipe.components.runtime.prepared_data import prepare_run
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.plan import plan_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.progress import Progress
run_file, run = sys.argv[1:]
plan = plan_run(RunConfig.model_validate(json.loads(run_file)))
pointers, _ = prepare_run(JobConfig.load(f"{run}/run.json"), Progress(run, "prepare-data", quiet=True))
state = json.loads(Path(run, "steps/prepare-data.json").read_text(encoding="utf-8"))["state"]
heavy = [name for name in ("torch", "transformers") if name in sys.modules]
print(json.dumps([heavy, plan.notes, state, pointers.features]))
"""


def test_a_run_on_data_that_are_there_is_planned_and_prepared_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    forget_analyses()  # what this process remembers is not in that folder
    content = merged(TINY, {"features.cache": "off", "output.root_uri": str(tmp_path)})
    job = make_run(tmp_path, "r1", {"features.cache": "off"}, features="off")
    plan = plan_run(RunConfig.model_validate(content))
    assert not any("before it is prepared" in note for note in plan.notes), "it is planned from the data"
    command = [sys.executable, "-c", AGAIN, json.dumps(content), job.run.run_uri]
    again = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    assert json.loads(again.stdout) == [[], list(plan.notes), "reused", "off"]
