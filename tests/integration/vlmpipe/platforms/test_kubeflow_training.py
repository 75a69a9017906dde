"""Two launchers that really train with the variables of Kubeflow's torch runtime: alone, and as a TrainJob.

The TrainJob is made by the step as it stands in a compiled pipeline, with the real Kubernetes client, in a strict fake
of the API that starts the nodes as processes on this machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.kubernetes.api import FakeKubernetes
from tests.support.paths import ROOT
from tests.support.pipelines.kubeflow_steps import IMAGE, inputs, run_folder, start_step, step_record
from tests.support.trainer.runs import make_run, metrics
from vlmpipe.components.runtime.run_results import job_metrics
from vlmpipe.config.run_config import load_run_file
from vlmpipe.pipelines.compile import compile_pipeline
from vlmpipe.trainer.errors import ExitCode

pytestmark = pytest.mark.timeout(300)

CHANGES = {"train.max_steps": 2}


def compiled_step(given: dict[str, Any], folder: Path) -> list[str]:
    """The command of the train step in the compiled digits pipeline, as KFP calls it with these inputs."""
    config = load_run_file(ROOT / "configs/digits.yaml", [f"cluster.image_uri={IMAGE}"])
    spec = yaml.safe_load(compile_pipeline(config, "kubeflow", folder / "pipeline.yaml").path.read_text())
    container = spec["deploymentSpec"]["executors"]["exec-train"]["container"]
    outputs = {"parameters": {"gcp_resources": {"outputFile": str(folder / "gcp_resources")}}}
    told = {"inputs": {"parameterValues": given}, "outputs": {**outputs, "outputFile": str(folder / "outputs.json")}}
    words = [*container["command"], *container["args"]]
    return [json.dumps(told) if word == "{{$}}" else word for word in words]


@pytest.mark.slow
def test_the_compiled_step_trains_on_two_nodes_and_leaves_its_results_where_they_are_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_run(tmp_path, "r", CHANGES, features="off")
    run = run_folder(Path(job.run.run_uri))
    with FakeKubernetes() as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path)))
        command = compiled_step(inputs(run, nodes=2), tmp_path)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (name,) = cluster.jobs
        outputs = json.loads((tmp_path / "outputs.json").read_text())["parameterValues"]
        assert f"/trainjobs/{name}" in outputs["gcp_resources"]
    assert re.search(rf"\[{name}-node-0-0-abcde\] launcher: node 0 of 2, chief localhost:\d+", done.stdout)
    assert "node-0-1-abcde]" not in done.stdout, "only the chief's lines are shown"
    assert job_metrics(str(run), "train")["steps"] == len(metrics(job)) == 2
    assert step_record(run)["state"] == "done" and step_record(run)["detail"]["exit_code"] == 0


def test_what_a_node_refuses_is_the_steps_own_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "run")
    with FakeKubernetes() as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path)))
        step = start_step(inputs(run, processes="all"))
        said = step.communicate(timeout=120)[0]
    assert step.returncode == ExitCode.CONFIG, said
    assert (
        "error: --nproc-per-node is 'all'" in said
        and "exit code 64 (configuration)" in said
        and step_record(run)["state"] == "failed"
    )


@pytest.mark.parametrize("wrong", [{"PET_NNODES": "1:4"}, {"PET_MASTER_PORT": ""}], ids=["elastic", "half"])
def test_a_launcher_whose_variables_are_not_kubeflows_ends_with_64(wrong: dict[str, str]) -> None:
    pet = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": "29500"}
    command = [
        sys.executable,
        "-m",
        "vlmpipe.trainer.launch",
        "--nproc-per-node",
        "1",
        "--",
        "vlmpipe.trainer.train",
        "--config",
        "x",
    ]
    environment = {**os.environ, **pet, **wrong}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.CONFIG and f"error: {next(iter(wrong))}" in done.stderr
