"""The command by which a step starts, and the disk that it gets: with more than the default one it is a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.pipelines.graphs import Spec, all_tasks, steps
from vlmpipe.components.decide import decide
from vlmpipe.components.runtime.parameters import compiled_settings
from vlmpipe.components.runtime.resolve import resolve
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.job_spec.check import check_job_spec
from vlmpipe.pipelines.compile import compile_pipeline
from vlmpipe.platforms.graph import component_of
from vlmpipe.platforms.pipeline_yaml import documents
from vlmpipe.trainer.errors import ConfigError

SEVEN_B = ROOT / "configs/llava-7b.yaml"
STEP = "prepare-data"
PROGRAM = """#!/usr/bin/env bash
trap 'exit 75' TERM
echo ready
while true; do sleep 0.05; done
"""


@pytest.fixture(scope="module")
def large() -> RunConfig:
    return load_run_file(SEVEN_B, [f"cluster.step_disks.{STEP}=300"])


def compiled(config: RunConfig, target: str, folder: Path) -> list[Spec]:
    return documents(compile_pipeline(config, target, folder / f"{target}.yaml").path.read_bytes())


def component(spec: Spec, step: str) -> Spec:
    return next(one for path, _, one in all_tasks(spec) if path.endswith(f"/{step}"))


def test_on_vertex_the_step_is_a_job_with_that_disk_and_with_the_steps_own_inputs_and_outputs(
    large: RunConfig, tmp_path: Path
) -> None:
    (spec,), (plain,) = compiled(large, "vertex", tmp_path), compiled(load_run_file(SEVEN_B), "vertex", tmp_path)
    task, before = steps(spec)[STEP], steps(plain)[STEP]
    assert task["inputs"] == before["inputs"] and task["dependentTasks"] == before["dependentTasks"]
    own, usual = component(spec, STEP), component(plain, STEP)
    for side in ("inputDefinitions", "outputDefinitions"):
        for kind, names in usual[side].items():
            assert names.keys() <= own[side][kind].keys()
    parameters = own["inputDefinitions"]["parameters"]
    assert parameters["service_account"]["defaultValue"] == large.gcp.service_account
    assert parameters["labels"]["defaultValue"]["vlmpipe-step"] == STEP
    (pool,) = parameters["worker_pool_specs"]["defaultValue"]
    assert pool["disk_spec"] == {"boot_disk_type": "pd-ssd", "boot_disk_size_gb": 300}
    assert pool["machine_spec"] == {"machine_type": "e2-standard-16"}
    assert pool["container_spec"]["image_uri"] == large.gcp.pipeline_image
    # A file of a pipeline has doubles only; Google's own components hand such numbers on.
    sent = json.loads(json.dumps(pool), parse_float=lambda number: int(float(number)))
    assert check_job_spec({"worker_pool_specs": [sent]}).worker_pool_specs[0].disk_spec.boot_disk_size_gb == 300
    executor = spec["deploymentSpec"]["executors"][own["executorLabel"]]["container"]
    assert "google-cloud-pipeline-components" in executor["image"] and "resources" not in executor
    assert "def prepare_data(" in str(pool["container_spec"]["command"]), "the step's own program"


def test_other_steps_stay_as_they_are(large: RunConfig, tmp_path: Path) -> None:
    (spec,), (plain,) = compiled(large, "vertex", tmp_path), compiled(load_run_file(SEVEN_B), "vertex", tmp_path)
    assert steps(spec).keys() == steps(plain).keys()
    changed = {name for name, task in steps(spec).items() if task != steps(plain)[name]}
    assert changed <= {"resolve-run"}, "which gets the disks, and the run file"
    assert component(spec, "sync-checkpoint") == component(plain, "sync-checkpoint")


def test_on_kubeflow_the_pod_gets_a_volume_for_its_temporary_files(large: RunConfig, tmp_path: Path) -> None:
    spec, platform = compiled(large, "kubeflow", tmp_path)
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    label = component(spec, STEP)["executorLabel"]
    assert list(executors) == [label]
    (volume,) = executors[label]["genericEphemeralVolume"]
    assert (volume["mountPath"], volume["size"], volume["accessModes"]) == ("/scratch", "300G", ["ReadWriteOnce"])
    environment = spec["deploymentSpec"]["executors"][label]["container"]["env"]
    assert {"name": "TMPDIR", "value": "/scratch"} in environment


def test_on_this_machine_nothing_is_different(large: RunConfig, tmp_path: Path) -> None:
    (spec,), (plain,) = compiled(large, "local", tmp_path), compiled(load_run_file(SEVEN_B), "local", tmp_path)
    assert spec["deploymentSpec"] == plain["deploymentSpec"]


def resolved(config: RunConfig, disks: dict[str, int], folder: Path, **overrides: Any) -> None:
    settings = compiled_settings(config, "vertex", str(folder), "", {"": disks})
    defaults = json.loads(settings)["parameters"]
    resolve(json.dumps(config.to_dict()), settings, run_id="r1", overrides=json.dumps(overrides), **defaults)


def test_a_run_that_outgrows_the_disks_of_its_compiled_pipeline_ends_in_its_first_step(tmp_path: Path) -> None:
    config = load_run_file(SEVEN_B)
    with pytest.raises(ConfigError, match="step prepare-data: its boot disk of 100 GB") as caught:
        resolved(config, {}, tmp_path, **{"plan.sample_images": 4})
    assert "cluster.step_disks.prepare-data=300" in str(caught.value)
    with pytest.raises(ConfigError, match=r"cluster\.step_disks differs from the compiled pipeline"):
        resolved(config, {}, tmp_path, **{"cluster.step_disks": {"prepare-data": 300}})


def test_a_step_that_is_stopped_hears_it_although_a_shell_started_it(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(PROGRAM)
    python.chmod(0o755)
    command = component_of(decide, "image").component_spec.implementation.container.command
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PATH": path}) as step:
        assert step.stdout and step.stdout.readline() == "ready\n"
        step.send_signal(signal.SIGTERM)  # to the process that the service has started, and to no other
        assert step.wait(timeout=30) == 75
