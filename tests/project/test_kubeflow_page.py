"""The page on Kubeflow: the YAML in it is what the code needs and the API takes."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1ClusterTrainingRuntime as Runtime

from tests.fakes.kubernetes.api import ALL_VERBS
from tests.fakes.kubernetes.train_job_rules import unknown_in
from tests.support.paths import ROOT
from tests.support.pipelines.example_project import load_for_vertex
from vlmpipe.config.sections.kubeflow import KubeflowConfig
from vlmpipe.platforms.kubeflow.jobs.manifest import NODE
from vlmpipe.platforms.kubeflow.requirements import require_kubeflow
from vlmpipe.platforms.table import platform_of

PAGE = (ROOT / "docs/how-to/run-on-kubeflow.md").read_text()
BLOCKS = [list(yaml.safe_load_all(text)) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.S)]


def documents(kind: str) -> Any:
    (found,) = (one for block in BLOCKS for one in block if one.get("kind") == kind)
    return found


def test_the_role_allows_what_the_step_asks_for_and_nothing_else() -> None:
    rules = documents("Role")["rules"]
    granted = {f"{verb} {what}" for rule in rules for what in rule["resources"] for verb in rule["verbs"]}
    assert granted == ALL_VERBS
    binding = documents("RoleBinding")
    assert binding["roleRef"]["name"] == documents("Role")["metadata"]["name"] == "vlmpipe-jobs"


def test_the_sections_are_ones_that_a_run_file_takes() -> None:
    on_s3, on_a_volume, of_the_cluster = (one for block in BLOCKS for one in block if "kubeflow" in one)
    assert KubeflowConfig.model_validate(of_the_cluster["kubeflow"]).queue == "team-queue"
    for content in (on_s3, on_a_volume):
        config = load_for_vertex(
            ROOT / "configs/digits.yaml", [f"{name}={json.dumps(content[name])}" for name in content]
        )
        assert platform_of("kubeflow").root_uri(config) == content["output"]["root_uri"]
        require_kubeflow(config)


def test_the_runtime_is_of_the_apis_form_and_has_what_a_job_patches() -> None:
    runtime = documents("ClusterTrainingRuntime")
    assert unknown_in(Runtime, runtime) == [] and Runtime.from_dict(runtime)
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert job["name"] == container["name"] == NODE
    assert job["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def test_the_types_of_the_api_know_what_they_do_not_know() -> None:
    runtime = documents("ClusterTrainingRuntime")
    runtime["spec"]["template"]["spec"]["restartPolicy"] = "Never"
    assert unknown_in(Runtime, runtime) == ["spec.template.spec.restartPolicy"]
