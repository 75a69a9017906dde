"""Scores by lmms-eval: what the run file may ask for, and where."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.pipelines.run_files import small
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.platforms.kubeflow.requirements import require_kubeflow
from vlmpipe.platforms.table import platform_of
from vlmpipe.platforms.vertex.requirements import require_vertex

TASKS = {"tasks": ["pope", "mmmu_val"]}
POPE = {"name": "pope", "format": "pope", "uri": "pope.json", "images": "images"}
OPAQUE = {"name": "mine", "command": ["train"], "result": "opaque", "evaluate_command": ["evaluate"]}


def config(**changes: Any) -> RunConfig:
    return small(**{"evaluate__lmms_eval": TASKS, **changes})


def test_the_gate_takes_any_score_of_a_task() -> None:
    assert config(gate__benchmarks={"mmmu_val": {"mmmu_acc": 0.4}}).gate.benchmarks["mmmu_val"] == {"mmmu_acc": 0.4}
    with pytest.raises(RunFileError, match="found a benchmark that is not run, expected one of pope, mmmu_val"):
        config(gate__benchmarks={"mme": {"score": 1.0}})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"evaluate__benchmarks": [POPE]}, "found pope, which evaluate.benchmarks has too"),
        ({"model__lora": {"rank": 4, "export": "adapter"}}, "transformers serve does not serve; expected merged"),
        ({"train__trainer": OPAQUE}, "train.trainer.result opaque, expected one that transformers serve can load"),
        ({"evaluate__lmms_eval": {"tasks": ["pope", "pope"]}}, "found task pope twice"),
        ({"evaluate__lmms_eval": {"tasks": []}}, "evaluate.lmms_eval.tasks"),
        ({"evaluate__lmms_eval": {"tasks": ["pope,mme"]}}, "evaluate.lmms_eval.tasks"),
    ],
)
def test_what_cannot_be_scored_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RunFileError, match=said):
        config(**changes)


def test_in_the_cloud_the_job_has_an_image_and_its_tasks_a_bucket() -> None:
    image = r'evaluate\.lmms_eval\.image_uri: found "", expected an image'
    for require in (require_vertex, require_kubeflow):
        with pytest.raises(RunFileError, match=image):
            require(config())
    with pytest.raises(RunFileError, match=r'evaluate\.lmms_eval\.include_path: found "tasks", expected a gs:// path'):
        platform_of("vertex").check_files(config(evaluate__lmms_eval={**TASKS, "include_path": "tasks"}))
