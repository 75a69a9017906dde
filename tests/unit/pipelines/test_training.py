"""The compiled pipeline: equal on all targets, deterministic, and what Vertex AI can take."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from tests.support.paths import ROOT
from tests.support.pipelines import golden_pipelines
from tests.support.pipelines.example_project import load_shipped
from tests.support.pipelines.graphs import Spec, all_tasks, shape, steps
from tests.support.short_form import WHOLE
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.job_spec.build import job_spec, jobs_of, worker_pools
from vlmpipe.job_spec.check import check_job_spec
from vlmpipe.pipelines.compile import compile_pipeline
from vlmpipe.pipelines.training import build
from vlmpipe.platforms.pipeline_yaml import documents
from vlmpipe.platforms.table import PLATFORMS
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.preflight.bought import VARIABLE

RUN_FILES = sorted((ROOT / "configs").glob("*.yaml"))
# Those whose graphs differ: compiling all of them is left to the whole form, and for Vertex AI to access/test_table.py.
DIFFERENT = ("arr-coc", "digits", "digits-preferences", "llava-7b-stages", "qwen2-5-vl-3b-weekly")
COMPILED = [path for path in RUN_FILES if WHOLE or path.stem in DIFFERENT]
SWEEPS = sorted((ROOT / "configs/sweeps").glob("*.yaml"))
JOB_STEPS = ("cache-features", "train", "evaluate")
DIGITS = ROOT / "configs/digits.yaml"
RUN_URI = "gs://example-bucket/vlmpipe/runs/r1"
TARGETS: tuple[str, ...] = tuple(PLATFORMS)


@pytest.fixture
def digits() -> RunConfig:
    return load_shipped(DIGITS)


_compiled: dict[tuple[str, str], bytes] = {}  # pickled, which is read faster than YAML: most tests look at the same few


def compiled(config: RunConfig, target: str, folder: Path) -> Spec:
    asked = (repr(config), target)
    if asked not in _compiled:
        path = compile_pipeline(config, target, folder / f"{config.name}.{target}.yaml").path
        (spec,) = documents(path.read_bytes())
        _compiled[asked] = pickle.dumps(spec)
    found: Spec = pickle.loads(_compiled[asked])
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("path", COMPILED, ids=lambda path: path.stem)
def test_a_strict_reader_finds_the_pipeline_that_was_written(path: Path, target: str, tmp_path: Path) -> None:
    config = load_shipped(path)
    read = json_format.ParseDict(compiled(config, target, tmp_path), pipeline_spec_pb2.PipelineSpec())
    assert read == build(config, target).pipeline_spec


def constants(task: Spec) -> Spec:
    """Constant inputs of a task, without the platform's name that our own job steps take."""
    return {
        name: given["runtimeValue"]["constant"]
        for name, given in task["inputs"]["parameters"].items()
        if "runtimeValue" in given and name != "target"
    }


@pytest.mark.parametrize("path", COMPILED, ids=lambda path: path.stem)
def test_the_graph_is_the_same_on_every_target(path: Path, tmp_path: Path) -> None:
    config = load_shipped(path)
    vertex, kubeflow, local = (compiled(config, target, tmp_path) for target in TARGETS)
    assert shape(vertex) == shape(kubeflow) == shape(local)
    of_each_stage = (
        "resolve-run", "prepare-data", "cache-features", "collect-cache-features", "reuse-features", "train",
        "sync-checkpoint", "evaluate", "decide",
    )  # fmt: skip
    before = [f"{stage.name}-" for stage in config.stages] or [""]
    named = {f"{stage}{step}" for stage in before for step in of_each_stage}
    named |= {f"{stage}reuse-stage" for stage in before[:-1]}
    assert set(steps(vertex)) == {*named, "register-model", "notify"}
    for name in (f"{stage}{step}" for stage in before for step in JOB_STEPS):
        assert constants(steps(vertex)[name]) == constants(steps(kubeflow)[name]) == constants(steps(local)[name])
    artifacts = {
        path.rpartition("/")[2].rpartition("sync-")[1] or "decide": one["output names"]["artifacts"]
        for path, one in shape(local).items()
        if path.endswith(("sync-checkpoint", "decide"))
    }
    assert artifacts == {
        "sync-": ["metrics: system.Metrics", "model: system.Model", "report: system.HTML"],
        "decide": [
            "confusion: system.ClassificationMetrics", "evaluation: system.Metrics", "metrics: system.Metrics",
            "report: system.HTML",
        ],
    }  # fmt: skip


@pytest.mark.parametrize("path", golden_pipelines.KEPT, ids=lambda path: path.stem)
def test_a_change_of_a_shipped_pipeline_is_seen_in_its_outline(path: Path) -> None:
    kept = (golden_pipelines.FOLDER / path.name).read_text()
    assert golden_pipelines.text(load_shipped(path)) == kept, (
        "python -m tests.support.pipelines.golden_pipelines writes them anew"
    )


def test_no_outline_is_of_a_run_file_that_is_gone() -> None:
    kept = {outline.name for outline in golden_pipelines.FOLDER.glob("*.yaml")}
    assert kept == {path.name for path in golden_pipelines.KEPT}


@pytest.mark.parametrize("path", golden_pipelines.RUN_FILES, ids=lambda path: path.stem)
def test_the_jobs_of_a_shipped_run_file_have_the_machines_that_it_names(path: Path) -> None:
    for run in load_shipped(path).stage_runs().values():
        cluster = run.cluster
        for job in jobs_of(run):
            pools = [pool for pool in job_spec(run, job, RUN_URI)["worker_pool_specs"] if pool]
            reducers = [pool for pool in pools if "reductionserver" in pool["container_spec"]["image_uri"]]
            workers = [pool for pool in pools if pool not in reducers]
            machines = [pool["machine_spec"] for pool in workers]
            assert {machine["machine_type"] for machine in machines} == {cluster.machine_type}
            assert {machine.get("accelerator_count", 0) for machine in machines} == {cluster.accelerator_count}
            assert all("@sha256:" in pool["container_spec"]["image_uri"] for pool in workers)
            trains = job == "train"
            assert sum(pool["replica_count"] for pool in workers) == (cluster.replica_count if trains else 1)
            wanted = cluster.reduction_server.replica_count if cluster.reduction_server and trains else 0
            if wanted == "auto":
                wanted = 13  # ceil(4 nodes x 100 Gbit/s / 32 Gbit/s of a reducer)
            assert sum(pool["replica_count"] for pool in reducers) == wanted


def test_several_data_tasks_prepare_chunks_side_by_side_before_they_are_put_together(tmp_path: Path) -> None:
    config = load_shipped(DIGITS, ["data.tasks=3"])
    vertex, kubeflow, local = (compiled(config, target, tmp_path) for target in TARGETS)
    assert shape(vertex) == shape(kubeflow) == shape(local)
    found = steps(vertex)
    assert found.keys() - steps(compiled(load_shipped(DIGITS), "vertex", tmp_path)) == {"plan-data", "prepare-chunks"}
    ((loop, task),) = [(path.rpartition("/")[2], task) for path, task, _ in all_tasks(vertex) if "for-loop" in path
                       and "parameterIterator" in task]  # fmt: skip
    assert task["dependentTasks"] == ["plan-data"] and "plan-data-Output" in str(task["parameterIterator"]["items"])
    assert loop in found["prepare-data"]["dependentTasks"]
    # Nothing but its own item goes into the loop: kfp.local would give the item to any other input, too.
    assert list(found["prepare-chunks"]["inputs"]["parameters"]) == ["share"]
    assert found["prepare-chunks"]["cachingOptions"] == {}
    resources = vertex["deploymentSpec"]["executors"]["exec-prepare-chunks"]["container"]["resources"]
    assert resources["resourceMemoryLimit"] == "64G"


def test_a_job_step_has_the_same_defaults_on_every_target(digits: RunConfig, tmp_path: Path) -> None:
    def defaults(target: str) -> dict[str, Any]:
        spec = compiled(digits, target, tmp_path)
        inputs = spec["components"]["comp-train"]["inputDefinitions"]["parameters"]
        values = {name: content.get("defaultValue") for name, content in inputs.items() if name != "target"}
        # Only the service knows these three; on this machine they are empty.
        return {name: "" if "{{$" in str(value) else value for name, value in values.items()}

    assert defaults("local") == defaults("kubeflow") == defaults("vertex")


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_every_job_of_a_shipped_run_file_is_one_that_vertex_takes(path: Path) -> None:
    config = load_shipped(path)
    for job in jobs_of(config):
        message = check_job_spec(job_spec(config, job, RUN_URI))
        assert message.worker_pool_specs[0].replica_count == 1
        assert message.base_output_directory.output_uri_prefix == RUN_URI
        assert message.worker_pool_specs[0].container_spec.args[-1] == f"{RUN_URI}/run.json"


@pytest.mark.parametrize("target", TARGETS)
def test_caching_is_off_for_every_step(digits: RunConfig, target: str, tmp_path: Path) -> None:
    options = {name: task["cachingOptions"] for name, task in steps(compiled(digits, target, tmp_path)).items()}
    assert len(options) == 11 and all(option == {} for option in options.values())


def test_no_step_installs_anything(digits: RunConfig, tmp_path: Path) -> None:
    executors = compiled(digits, "vertex", tmp_path)["deploymentSpec"]["executors"]
    assert len(executors) == 11
    assert not [name for name, executor in executors.items() if "pip install" in str(executor["container"])]
    images = {executor["container"]["image"] for executor in executors.values()}
    assert images == {digits.gcp.pipeline_image, "gcr.io/ml-pipeline/google-cloud-pipeline-components:2.22.0"}


@pytest.mark.parametrize("path", COMPILED, ids=lambda path: path.stem)
def test_a_pipeline_for_kubeflow_holds_nothing_of_vertex(path: Path, tmp_path: Path) -> None:
    config = load_shipped(path, ["notify.email=[a@b.org]"])
    spec = compiled(config, "kubeflow", tmp_path)
    executors = spec["deploymentSpec"]["executors"]
    assert {executor["container"]["image"] for executor in executors.values()} == {config.gcp.pipeline_image}
    assert "google_cloud_pipeline_components" not in str(executors) and "mail" not in steps(spec)
    assert "{{$.pipeline_google_cloud" not in str(spec), "placeholders that only Vertex AI replaces"


def test_a_run_on_kubeflow_is_called_after_its_workflow_which_no_other_run_shares(
    digits: RunConfig, tmp_path: Path
) -> None:
    found = steps(compiled(digits, "kubeflow", tmp_path))
    for name in ("resolve-run", "notify"):
        assert constants(found[name])["job_name"] == "{{$.pipeline_job_resource_name}}"


def test_parameters_are_few_described_and_need_no_value(digits: RunConfig, tmp_path: Path) -> None:
    parameters = compiled(digits, "vertex", tmp_path)["root"]["inputDefinitions"]["parameters"]
    assert 0 < len(parameters) <= 12
    assert all(parameter["description"] and "defaultValue" in parameter for parameter in parameters.values())
    assert load_run_file_text(parameters["run_file"]["defaultValue"], tmp_path) == digits


@pytest.mark.parametrize("path", COMPILED, ids=lambda path: path.stem)
def test_console_shows_the_run_files_values_as_defaults(path: Path, tmp_path: Path) -> None:
    config = load_shipped(path)
    parameters = compiled(config, "vertex", tmp_path)["root"]["inputDefinitions"]["parameters"]
    shown = {name: one["defaultValue"] for name, one in parameters.items()}
    assert (shown["epochs"], shown["max_steps"]) == (config.train.epochs, config.train.max_steps)
    assert (shown["seed"], shown["resume"]) == (config.train.seed, config.train.resume)
    assert (shown["data_uri"], shown["min_exact_match"]) == (config.data.source, config.gate.min_exact_match)
    assert shown["learning_rate"] == config.train.optimizer.learning_rate


def load_run_file_text(text: str, folder: Path) -> RunConfig:
    (folder / "run_file.json").write_text(text)
    return load_run_file(folder / "run_file.json")


def test_settings_of_the_run_file_reach_the_job_step(tmp_path: Path) -> None:
    overrides = [
        "cluster.scheduling_strategy=flex_start",
        "cluster.machine_type=g2-standard-8",
        "cluster.accelerator_type=NVIDIA_L4",
        "cluster.accelerator_count=1",
        "cluster.timeout=3600s",
        "cluster.max_wait_duration=600s",
        "cluster.restart_job_on_worker_restart=true",
        "gcp.persistent_resource_id=pool",
        "gcp.network=projects/1/global/networks/n",
        "gcp.tensorboard=projects/1/locations/us-central1/tensorboards/2",
        "gcp.enable_web_access=true",
        "gcp.encryption_spec_key_name=projects/p/locations/us-central1/keyRings/r/cryptoKeys/key",
        "gcp.labels={team: vision}",
    ]
    spec = compiled(load_shipped(DIGITS, overrides), "vertex", tmp_path)
    given = constants(steps(spec)["train"])
    assert given == {
        "display_name": "digits-train",
        "project": "example-project",
        "location": "us-central1",
        "service_account": "vlmpipe@example-project.iam.gserviceaccount.com",
        "strategy": "FLEX_START",
        "timeout": "3600s",
        "max_wait_duration": "600s",
        "restart_job_on_worker_restart": True,
        "persistent_resource_id": "pool",
        "network": "projects/1/global/networks/n",
        "tensorboard": "projects/1/locations/us-central1/tensorboards/2",
        "enable_web_access": True,
        "encryption_spec_key_name": "projects/p/locations/us-central1/keyRings/r/cryptoKeys/key",
        "labels": {"team": "vision", "vlmpipe-step": "train"},
    }
    assert "tensorboard" not in constants(steps(spec)["evaluate"]), "only training writes TensorBoard files"


def test_jobs_run_as_an_account_of_their_own_where_there_is_one() -> None:
    account = "trainer@example-project.iam.gserviceaccount.com"
    config = load_shipped(DIGITS, [f"gcp.job_service_account={account}"])
    assert [job_spec(config, job, RUN_URI)["service_account"] for job in jobs_of(config)] == [account] * 3
    with pytest.raises(ConfigError, match=r"gcp\.job_service_account"):
        load_shipped(DIGITS, ["gcp.job_service_account=me@example.com"])


def test_a_reduction_server_is_pool_2_of_the_training_job_alone() -> None:
    config = load_run_file(ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml")
    chief, workers, reducers = worker_pools(config, "train", RUN_URI)
    assert (chief["replica_count"], workers["replica_count"], reducers["replica_count"]) == (1, 3, 13)
    assert "reductionserver" in reducers["container_spec"]["image_uri"]
    assert set(reducers["container_spec"]) == {"image_uri"} and "accelerator_type" not in reducers["machine_spec"]
    assert len(worker_pools(config, "evaluate", RUN_URI)) == 1


def test_what_vertex_needs_and_the_run_file_lacks_is_named(tmp_path: Path) -> None:
    config = load_shipped(DIGITS, ["gcp.service_account="])
    with pytest.raises(ConfigError, match=r"gcp\.service_account: missing"):
        compile_pipeline(config, "vertex", tmp_path / "p.yaml")
    assert not list(tmp_path.iterdir())
    compile_pipeline(config, "local", tmp_path / "p.yaml")


def test_large_steps_get_machines_on_vertex_and_a_job_is_not_retried(digits: RunConfig, tmp_path: Path) -> None:
    spec = compiled(digits, "vertex", tmp_path)
    resources = spec["deploymentSpec"]["executors"]["exec-sync-checkpoint"]["container"]["resources"]
    assert resources["resourceMemoryLimit"] == "64G"
    assert {name for name, task in steps(spec).items() if "retryPolicy" in task} == {
        "sync-checkpoint", "register-model", "notify"
    }  # fmt: skip
    assert steps(spec)["sync-checkpoint"]["taskInfo"]["name"] == "Sync checkpoint"
    assert spec["root"]["dag"]["tasks"]["notify"]["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"


SERVER = f"us-docker.pkg.dev/my-project/serving/vllm@sha256:{'1' * 64}"
DEPLOYS = {
    "vertex": ["register.registry=vertex://digits", f"deploy.image_uri={SERVER}"],
    "kubeflow": [f"deploy.image_uri=vllm/vllm-openai@sha256:{'1' * 64}"],
    "local": [],
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_section_deploy_is_a_step_behind_the_registration(target: str, tmp_path: Path) -> None:
    config = load_shipped(DIGITS, ["deploy.endpoint=digits", *DEPLOYS[target]])
    spec = compiled(config, target, tmp_path)
    step = steps(spec)["deploy-model"]
    assert "register-model" in step["dependentTasks"]
    assert constants(step)["where"] == target
    assert "deploy-model" not in steps(compiled(load_shipped(DIGITS), target, tmp_path))


@pytest.mark.parametrize(
    ("target", "overrides", "said"),
    [
        ("vertex", [], "deploy.image_uri"),
        ("vertex", [f"deploy.image_uri={SERVER}"], "expected vertex://MODEL_ID"),
        ("kubeflow", [], "deploy.image_uri"),
    ],
)
def test_what_a_deployment_needs_and_the_run_file_lacks_is_named(
    target: str, overrides: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        compiled(load_shipped(DIGITS, ["deploy.endpoint=digits", *overrides]), target, tmp_path)


@pytest.mark.parametrize("target", TARGETS)
def test_lmms_eval_is_a_job_between_evaluation_and_gate(target: str, tmp_path: Path) -> None:
    section = '{"tasks": ["pope"], "image_uri": "us-docker.pkg.dev/my-project/vlmpipe/lmms-eval:1"}'
    machine = '{"machine_type": "g2-standard-8", "accelerator_type": "NVIDIA_L4", "accelerator_count": 1}'
    own = ["cluster.evaluate_replica_count=2", f"cluster.evaluate_machine={machine}"]
    config = load_shipped(DIGITS, [f"evaluate.lmms_eval={section}", *own])
    whole = steps(compiled(config, target, tmp_path))
    assert whole["decide"]["dependentTasks"] == ["benchmark", "resolve-run"]
    assert "evaluate" in whole["benchmark"]["dependentTasks"]
    assert compile_pipeline(config, target, tmp_path / "again.yaml").jobs == 4
    assert compile_pipeline(load_shipped(DIGITS), target, tmp_path / "without.yaml").jobs == 3
    (pool,) = job_spec(config, "benchmark", RUN_URI)["worker_pool_specs"]
    assert (pool["replica_count"], pool["machine_spec"]["machine_type"]) == (1, "g2-standard-8")
    (bought,) = pool["container_spec"].pop("env")
    assert bought["name"] == VARIABLE and '"step":"benchmark"' in bought["value"]
    assert pool["container_spec"] == {
        "image_uri": "us-docker.pkg.dev/my-project/vlmpipe/lmms-eval:1",
        "command": ["python", "-m", "vlmpipe.trainer.evaluation.lmms_eval"],
        "args": ["--config", f"{RUN_URI}/run.json"],
    }
    check_job_spec(job_spec(config, "benchmark", RUN_URI))


@pytest.mark.parametrize("target", TARGETS)
def test_an_audit_is_a_job_for_which_the_gate_does_not_wait(target: str, tmp_path: Path) -> None:
    machine = '{"machine_type": "g2-standard-8", "accelerator_type": "NVIDIA_L4", "accelerator_count": 1}'
    config = load_shipped(DIGITS, ["evaluate.audit={max_samples: 500}", f"cluster.evaluate_machine={machine}"])
    whole = steps(compiled(config, target, tmp_path))
    assert whole["decide"]["dependentTasks"] == ["evaluate", "resolve-run"]
    assert "sync-checkpoint" in whole["audit"]["dependentTasks"]
    assert "audit" in whole["collect-audit"]["dependentTasks"]
    assert compile_pipeline(config, target, tmp_path / "again.yaml").jobs == 4
    (pool,) = job_spec(config, "audit", RUN_URI)["worker_pool_specs"]
    assert (pool["replica_count"], pool["machine_spec"]["machine_type"]) == (1, "g2-standard-8")
    assert "vlmpipe.trainer.audit.job" in pool["container_spec"]["args"]
    check_job_spec(job_spec(config, "audit", RUN_URI))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("path", SWEEPS if WHOLE else SWEEPS[:1], ids=lambda path: path.stem)
def test_a_sweep_has_loops_over_preparations_and_jobs_and_one_comparison(
    path: Path, target: str, tmp_path: Path
) -> None:
    config = load_shipped(path)
    assert config.sweep
    spec = compiled(config, target, tmp_path)
    read = json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())
    assert read == build(config, target).pipeline_spec
    loops = [task for _, task, _ in all_tasks(spec) if "parameterIterator" in task]
    assert len(loops) == 2
    for task in loops:
        assert task["iteratorPolicy"] == {"parallelismLimit": config.sweep.parallelism}
    names = [name.rpartition("relevance-")[2] for name in steps(spec)]
    of_sweep = ["open-sweep", "prepare-data", "cache-features", "list-jobs", "train-variants", "compare-variants"]
    assert [name for name in of_sweep if name not in names] == []
    assert "decide" not in [name for name in steps(spec) if not name.startswith("base")]
    assert not any("register-model" in name for name in steps(spec))


def test_a_sweep_whose_variant_has_an_impossible_machine_is_not_compiled(tmp_path: Path) -> None:
    wrong = "sweep={variants: {a: {}, b: {cluster.machine_type: no-such-machine}}}"
    config = load_shipped(DIGITS, ["cluster.replica_count=1", wrong])
    with pytest.raises(ConfigError, match="variant b: ") as caught:
        compile_pipeline(config, "vertex", tmp_path / "pipeline.yaml")
    assert "no-such-machine" in str(caught.value) and not (tmp_path / "pipeline.yaml").exists()
