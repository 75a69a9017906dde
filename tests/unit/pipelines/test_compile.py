"""A compiled pipeline: its exit tasks are tasks of the pipeline itself, and it reads as it was meant.

No postponed annotations here: kfp reads the components' types from the functions themselves.
"""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.auth.credentials import AnonymousCredentials
from kfp import compiler, components, dsl

from tests.support.paths import ROOT
from tests.support.pipelines.example_project import load_shipped
from tests.support.pipelines.graphs import Spec, all_tasks, shape, steps
from vlmpipe.config.overrides import apply_overrides, leaves
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.job_spec.check import check_jobs
from vlmpipe.pipelines.compile import check_exit_tasks, check_file, compile_pipeline
from vlmpipe.pipelines.training import build
from vlmpipe.platforms.kubeflow.requirements import require_kubeflow
from vlmpipe.platforms.pipeline_yaml import documents, dump_documents
from vlmpipe.platforms.table import PLATFORMS
from vlmpipe.platforms.vertex.requirements import require_vertex
from vlmpipe.trainer.errors import UserError

DIGITS = ROOT / "configs/digits.yaml"
MAILED = (DIGITS, ROOT / "configs/digits-stages.yaml", ROOT / "configs/sweeps/qwen3-vl-2b-scorers.yaml")


@pytest.fixture
def digits() -> RunConfig:
    return load_shipped(DIGITS)


def compiled(config: RunConfig, target: str, folder: Path) -> Spec:
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
    config = load_shipped(DIGITS, ["notify.email=[a@b.org]", "notify.webhook=https://ci.example.com/runs"])
    vertex, local = compiled(config, "vertex", tmp_path), compiled(config, "local", tmp_path)
    plain = compiled(load_shipped(DIGITS), "local", tmp_path)
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
    spec = compiled(load_shipped(path, ["notify.email=[a@b.org]"]), "vertex", tmp_path)
    assert exit_tasks(spec) == ["/mail", "/notify"]
    assert exit_tasks(compiled(load_shipped(path), "kubeflow", tmp_path)) == ["/notify"]


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


# --- texts ---

# What ends a line, or is no character, for readers of YAML; and what would be a key of the pipeline's own. Run files
# refuse control characters of ASCII.
BREAKS = ["\u2028", "\u2029", "\u0085", "\r", "\n", "\x80", "\x9f", "\ufeff", "\u200e", "\ue000"]
NASTY = "".join(f"a{one}" for one in BREAKS) + "\ndeploymentSpec: {}\n# 'é\U0001f600\xa0\"\\u0041 "


def texts_of(config: RunConfig) -> list[str]:
    """Dotted paths of the run file's texts."""
    found = []
    for path, value in leaves(config.to_dict()):
        if isinstance(value, str):
            found.append(path)
        elif isinstance(value, dict):
            found += [f"{path}.{name}" for name, one in value.items() if isinstance(one, str)]
    return found


def accepted_with(content: dict[str, Any], path: str, text: str) -> dict[str, Any] | None:
    """The content with the text in that field; None where the run file, a target or a job's spec refuses it."""
    changed = apply_overrides(content, {path: text})
    try:
        config = parse_run_config(copy.deepcopy(changed), "x")
        require_vertex(config)
        require_kubeflow(config)
        check_jobs(config, "gs://bucket/runs/r")
    except UserError:
        return None
    return changed


@pytest.fixture(scope="module")
def nasty() -> RunConfig:
    """The quickstart's run file with such a text in every field that takes one."""
    config = load_shipped(ROOT / "configs/digits.yaml", ["output.root_uri=gs://bucket/root"])
    content = apply_overrides(config.to_dict(), {"cluster.env": {"NAME": "value"}})
    taken = list[str]()
    for path in texts_of(parse_run_config(content, "x")):
        if changed := accepted_with(content, path, NASTY):
            content = changed
            taken.append(path)
    assert len(taken) >= 3 and "data.caption_question" in taken and "cluster.env.NAME" in taken, taken
    return parse_run_config(content, "x")


@pytest.mark.parametrize("target", list(PLATFORMS))
def test_every_text_of_a_run_file_is_read_back(nasty: RunConfig, target: str, tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    compile_pipeline(nasty, target, path)
    data = path.read_bytes()
    spec = documents(data)[0]
    assert spec == next(iter(yaml.safe_load_all(data))), "every reader of YAML reads the same"
    assert set(spec) == set(documents(clean(target, tmp_path))[0])
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert json.loads(parameters["run_file"]["defaultValue"]) == nasty.to_dict()
    assert all(line.startswith("#") for line in data.decode().partition("\ncomponents:")[0].split("\n"))


def clean(target: str, folder: Path) -> bytes:
    path = folder / "clean.yaml"
    compile_pipeline(load_shipped(ROOT / "configs/digits.yaml"), target, path)
    return path.read_bytes()


@pytest.mark.parametrize("target", ["vertex", "local"])
def test_the_file_equals_the_one_of_kfps_own_compiler(digits: RunConfig, target: str, tmp_path: Path) -> None:
    compiler.Compiler().compile(build(digits, target), str(tmp_path / "kfp.yaml"))
    theirs = (tmp_path / "kfp.yaml").read_bytes()
    ours = compile_pipeline(digits, target, tmp_path / "ours.yaml").path.read_bytes()
    assert documents(ours) == documents(theirs)
    comments = [[line for line in text.splitlines() if line.startswith(b"#")] for text in (ours, theirs)]
    assert comments[0] == comments[1] != []


def test_compiling_again_in_another_process_gives_the_same_bytes(digits: RunConfig, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.support.pipelines.example_project import load_shipped; "
        "from vlmpipe.pipelines.compile import compile_pipeline; "
        "compile_pipeline(load_shipped(sys.argv[1]), 'vertex', Path(sys.argv[2]))"
    )
    here, there = tmp_path / "here.yaml", tmp_path / "there.yaml"
    compile_pipeline(digits, "vertex", here)
    environment = {**os.environ, "PYTHONHASHSEED": "1"}  # another order of sets
    subprocess.run([sys.executable, "-c", program, str(DIGITS), str(there)], cwd=ROOT, env=environment, check=True)
    assert here.read_bytes() == there.read_bytes()


def test_two_documents_are_never_written(digits: RunConfig, tmp_path: Path) -> None:
    data = compile_pipeline(digits, "vertex", tmp_path / "p.yaml").path.read_bytes()
    contents = documents(data)
    check_file(data, contents, documents=1)
    further = {"platforms": {"kubernetes": {}}}
    with pytest.raises(UserError, match="two documents"):
        check_file(dump_documents([*contents, further]).encode(), [*contents, further], documents=1)
    for changed in (data + b"---\nplatforms: {kubernetes: {}}\n", data.replace(b"digits", b"digit5"), data + b"\x80"):
        with pytest.raises(UserError, match="the pipeline was compiled to YAML that"):
            check_file(changed, contents, documents=1)


def test_the_file_for_kubeflow_is_one_that_kfp_loads_and_its_bytes_stay_the_same(
    digits: RunConfig, tmp_path: Path
) -> None:
    first, second = (compile_pipeline(digits, "kubeflow", tmp_path / name).path for name in ("a.yaml", "b.yaml"))
    assert first.read_bytes() == second.read_bytes()
    loaded = components.load_component_from_file(str(first))
    assert loaded.name == "digits" and "learning_rate" in loaded.component_spec.inputs


def test_the_vertex_sdk_reads_the_file_and_knows_its_parameters(digits: RunConfig, tmp_path: Path) -> None:
    from google.cloud import aiplatform

    path = compile_pipeline(digits, "vertex", tmp_path / "p.yaml").path
    service = {"project": "example-project", "location": "us-central1", "credentials": AnonymousCredentials()}
    arguments = {"display_name": "d", "template_path": str(path), "pipeline_root": "gs://example-bucket/vlmpipe"}
    job = aiplatform.PipelineJob(parameter_values={"epochs": 2, "run_id": "r1"}, **arguments, **service)
    assert job.pipeline_spec["pipelineInfo"]["name"] == "digits"
    with pytest.raises(ValueError, match="epoch "):
        aiplatform.PipelineJob(parameter_values={"epoch ": 2}, **arguments, **service)
