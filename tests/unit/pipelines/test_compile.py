"""Exit tasks of a compiled pipeline: each is a task of the pipeline itself, never of a group inside it.

No postponed annotations here: kfp reads the components' types from the functions themselves.
"""

from pathlib import Path

import pytest
from kfp import dsl

from tests.support.paths import ROOT
from tests.support.pipelines.graphs import Spec, all_tasks, shape, steps
from vlmpipe.backends.vertex.pipeline_yaml import documents
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.pipelines.compile import check_exit_tasks, compile_pipeline
from vlmpipe.pipelines.targets import TargetName

DIGITS = ROOT / "configs/digits.yaml"
MAILED = (DIGITS, ROOT / "configs/digits-stages.yaml", ROOT / "configs/sweeps/qwen3-vl-2b-scorers.yaml")


def compiled(config: RunConfig, target: TargetName, folder: Path) -> Spec:
    (spec,) = documents(compile_pipeline(config, target, folder / f"{target}.yaml").path.read_bytes())
    return dict(spec)


def exit_tasks(spec: Spec) -> list[str]:
    """Paths of the tasks that run whatever became of those before them."""
    return [
        path
        for path, task, _ in all_tasks(spec)
        if task.get("triggerPolicy", {}).get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED"
        or "taskFinalStatus" in str(task.get("inputs"))
    ]


def test_mail_is_a_second_exit_task_on_vertex_and_nothing_elsewhere(tmp_path: Path) -> None:
    config = load_run_file(DIGITS, ["notify.email=[a@b.org]", "notify.webhook=https://ci.example.com/runs"])
    vertex, local = compiled(config, "vertex", tmp_path), compiled(config, "local", tmp_path)
    plain = compiled(load_run_file(DIGITS), "local", tmp_path)
    with_mail = shape(vertex)
    assert list(with_mail.pop("/mail")["input names"]["parameters"]) == [
        "pipeline_task_final_status: TASK_FINAL_STATUS", "recipients: LIST",
    ]  # fmt: skip
    assert with_mail == shape(local) == shape(plain), "mail changes nothing else in the graph"
    mail, notify = steps(vertex)["mail"], steps(vertex)["notify"]
    assert mail["inputs"]["parameters"]["recipients"] == {"runtimeValue": {"constant": ["a@b.org"]}}
    assert mail["cachingOptions"] == {}
    for field in ("dependentTasks", "triggerPolicy"):
        assert mail[field] == notify[field]
    status = notify["inputs"]["parameters"]["status"]
    assert mail["inputs"]["parameters"]["pipeline_task_final_status"] == status
    assert exit_tasks(vertex) == ["/mail", "/notify"]
    for spec in (vertex, local):
        webhook = steps(spec)["notify"]["inputs"]["parameters"]["webhook"]
        assert webhook == {"runtimeValue": {"constant": "https://ci.example.com/runs"}}


@pytest.mark.parametrize("path", MAILED, ids=lambda path: path.stem)
def test_mail_makes_no_exit_task_inside_another_group(path: Path, tmp_path: Path) -> None:
    spec = compiled(load_run_file(path, ["notify.email=[a@b.org]"]), "vertex", tmp_path)
    assert exit_tasks(spec) == ["/mail", "/notify"]
    assert exit_tasks(compiled(load_run_file(path), "kubeflow", tmp_path)) == ["/notify"]


def test_an_exit_handler_inside_a_pipeline_that_is_a_step_is_not_compiled() -> None:
    """As kfp compiles it: its guard does not look there."""

    @dsl.component(base_image="python")
    def step() -> None: ...

    @dsl.component(base_image="python")
    def inner_end() -> None: ...

    @dsl.component(base_image="python")
    def outer_end() -> None: ...

    @dsl.pipeline
    def inner() -> None:
        with dsl.ExitHandler(inner_end()):
            step()

    @dsl.pipeline
    def outer() -> None:
        with dsl.ExitHandler(outer_end()):
            inner()

    with pytest.raises(AssertionError, match=r"exit tasks inside groups.*inner-end"):
        check_exit_tasks(outer.pipeline_spec)
