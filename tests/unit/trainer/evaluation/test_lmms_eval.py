"""The benchmark job around lmms-eval, in whose place stands a strict program of the same command line."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.paths import ROOT
from vlmpipe.components.runtime.run_results import job_metrics
from vlmpipe.config.run_config import load_run_file
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.config.lmms_eval import LmmsEvalConfig
from vlmpipe.trainer.errors import ConfigError, DataError, UserError
from vlmpipe.trainer.evaluation import lmms_eval
from vlmpipe.trainer.evaluation.lmms_eval import benchmark, require_ready
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_lines, read_record, write_record

URL, MODEL = "http://127.0.0.1:1/v1", "/scratch/model"
STAND_IN = """#!{python}
import argparse, json, os, pathlib, sys
assert sys.argv[1:3] == ["-m", "lmms_eval"], sys.argv
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("model", "model_args", "tasks", "batch_size", "output_path", "include_path"):
    parser.add_argument("--" + name, required=True)
parser.add_argument("--limit")
parser.add_argument("--log_samples", action="store_true", required=True)
given = parser.parse_args(sys.argv[3:])
options = dict(part.split("=", 1) for part in given.model_args.split(","))
assert (given.model, options["base_url"], options["model_version"]) == ("openai", "{url}", "{model}")
assert os.environ["OPENAI_API_KEY"] == "none" and "PYTHONPATH" not in os.environ
assert pathlib.Path(given.include_path, "mine.yaml").read_text() == "task: mine"
if {code}:
    sys.exit({code})
folder = pathlib.Path(given.output_path, "model")
folder.mkdir(parents=True)
results = {{given.tasks: {{"acc,none": 0.5}}}}
(folder / "1_results.json").write_text(json.dumps({{"results": results, "n-samples": {{}}}}))
lines = [json.dumps({{"doc_id": n, "target": "a", "filtered_resps": "a", "acc": n}}) for n in (0, 1)]
(folder / f"1_samples_{{given.tasks}}.jsonl").write_text("\\n".join(lines))
"""


def program(folder: Path, code: int = 0) -> Path:
    path = folder / "python"
    path.write_text(STAND_IN.format(python=sys.executable, url=URL, model=MODEL, code=code))
    path.chmod(0o755)
    return path


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, **section: Any) -> JobConfig:
    """A run that was evaluated, of which `serving` says that it is served."""

    @contextlib.contextmanager
    def serving(run_uri: str) -> Iterator[SimpleNamespace]:
        assert run_uri == str(folder / "runs/r1")
        yield SimpleNamespace(url=URL, model=MODEL)

    monkeypatch.setattr(lmms_eval, "serving", serving)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tasks := folder / "tasks").mkdir()
    (tasks / "mine.yaml").write_text("task: mine")
    own = {"tasks": ["mine"], "include_path": str(tasks), "python": str(program(folder)), **section}
    config = load_run_file(ROOT / "configs/digits.yaml", [f"evaluate.lmms_eval={json.dumps(own)}"])
    job = JobConfig.model_validate(config.to_run_json(RunPaths(run_id="r1", root_uri=str(folder))))
    evaluation = {"exact_match": 0.9, "benchmarks": {"pope": {"scores": {"f1": 0.25}}}}
    write_record(open_storage(job.run.run_uri), "evaluate.json", evaluation)
    return job


def test_scores_join_those_of_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = run(tmp_path, monkeypatch, limit=2)
    benchmark(job)
    store = open_storage(job.run.run_uri)
    found = read_record(store, "evaluate.json")
    assert (found["exact_match"], found["benchmarks"]["pope"]["scores"]) == (0.9, {"f1": 0.25})
    assert found["benchmarks"]["mine"]["scores"] == {"acc": 0.5}
    assert [line["score"] for line in read_lines(store, "benchmarks/mine.jsonl")] == [0.0, 1.0]
    assert read_record(store, "steps/benchmark.json")["message"] == "lmms-eval: mine acc 0.500"
    assert job_metrics(job.run.run_uri, "benchmark") == {"pope.f1": 0.25, "mine.acc": 0.5}


def test_a_harness_that_fails_leaves_the_evaluation_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = run(tmp_path, monkeypatch)
    store, before = open_storage(job.run.run_uri), open_storage(job.run.run_uri).read("evaluate.json")
    program(tmp_path, code=3)
    with pytest.raises(UserError, match="lmms-eval ended with exit code 3"):
        benchmark(job)
    assert store.read("evaluate.json") == before
    assert read_record(store, "steps/benchmark.json")["state"] == "failed"


def test_without_a_python_of_its_own_the_images_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"/opt/lmms-eval/bin/python cannot be started: No such file"):
        benchmark(run(tmp_path, monkeypatch, python=""))


def test_what_a_job_needs_is_looked_for_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path)
    (tmp_path / "tasks").mkdir()
    monkeypatch.chdir(tmp_path)
    section = LmmsEvalConfig(tasks=("mine",), include_path="tasks", python="python")
    with pytest.raises(DataError, match=r"include_path: .*/tasks holds no task"):
        require_ready(section)
    (tmp_path / "tasks/mine.yaml").write_text("task: mine")
    ready = require_ready(section)
    assert (ready.include_path, ready.python) == (str(tmp_path / "tasks"), str(tmp_path / "python"))
    for python, said in (("", "no Python is named"), ("tasks/mine.yaml", r"tasks/mine\.yaml is no program")):
        with pytest.raises(ConfigError, match=said):
            require_ready(section.model_copy(update={"python": python}))
