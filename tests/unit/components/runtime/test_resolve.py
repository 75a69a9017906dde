"""What a person sets for one run: merged, checked, and written where the jobs read it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.gcs.server import FakeGcs
from tests.support.paths import ROOT
from tests.support.pipelines.example_project import load_shipped
from tests.support.trainer.benchmark_files import write
from vlmpipe.components.runtime.parameters import PARAMETER_FIELDS, compiled_settings, parameter_defaults
from vlmpipe.components.runtime.resolve import Resolved, resolve
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.planner.steps.estimate import Stage
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError
from vlmpipe.trainer.storage import open_storage, s3
from vlmpipe.trainer.storage.model_folders import revision_of
from vlmpipe.trainer.weights_digest import model_sha256


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_run_file(ROOT / "configs/digits.yaml", [f"output.root_uri={tmp_path}"])


def resolved(config: RunConfig, target: str = "local", **inputs: Any) -> Resolved:
    compiled = compiled_settings(config, target, config.output.root_uri)
    inputs = {"job_name": "digits-1", "run_file": json.dumps(config.to_dict()), **inputs}
    return resolve(inputs.pop("run_file"), compiled, **inputs)


def refusal(config: RunConfig, **inputs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(config, **inputs)
    assert caught.value.code == 64
    return str(caught.value)


def test_parameters_left_at_their_defaults_leave_the_run_file_as_it_is(config: RunConfig) -> None:
    assert resolved(config, **parameter_defaults(config), overrides="").config == config
    assert resolved(config, data_uri="", resume=" ", overrides=" \n").config == config


def test_defaults_are_the_run_files_values(config: RunConfig) -> None:
    defaults = parameter_defaults(config)
    assert defaults.keys() == PARAMETER_FIELDS.keys()
    assert (defaults["data_uri"], defaults["epochs"]) == (config.data.source, config.train.epochs)
    assert defaults["learning_rate"] == config.train.optimizer.learning_rate > 0


def test_defaults_do_not_override_a_run_file_that_was_replaced(config: RunConfig) -> None:
    other = config.to_dict()
    other["train"]["epochs"] = config.train.epochs + 1
    parameters = parameter_defaults(config)
    assert resolved(config, run_file=json.dumps(other), **parameters).config.train.epochs == config.train.epochs + 1
    parameters["epochs"] = 9
    assert resolved(config, run_file=json.dumps(other), **parameters).config.train.epochs == 9


def test_a_pipeline_of_an_earlier_version_goes_on_in_a_newer_image(config: RunConfig) -> None:
    earlier = config.to_dict()
    earlier["train"] |= {"freeze_gc": True}
    earlier["cluster"] |= {"local_port": 0}
    compiled = json.loads(compiled_settings(config, "local", config.output.root_uri))
    found = resolve(json.dumps(earlier), json.dumps(compiled | {"run_file": earlier}), job_name="digits-1")
    assert (found.config, found.differences) == (config, {})
    assert "leave it out" in refusal(config, run_file=json.dumps(earlier), overrides='{"train.freeze_gc": false}')


def test_what_differs_from_the_compiled_pipeline_is_known(config: RunConfig) -> None:
    assert resolved(config, **parameter_defaults(config)).differences == {}
    overrides = json.dumps({"gate": {"max_loss": 3.0}, "evaluate.max_new_tokens": 5})
    found = resolved(config, epochs=config.train.epochs + 1, overrides=overrides).differences
    assert found == {
        "gate.max_loss": (config.gate.max_loss, 3.0),
        "evaluate.max_new_tokens": (config.evaluate.max_new_tokens, 5),
        "train.epochs": (config.train.epochs, config.train.epochs + 1),
    }
    other = config.to_dict() | {"gate": {"min_exact_match": 0.1}}
    assert "gate.min_margin_over_chance" in resolved(config, run_file=json.dumps(other)).differences


def test_what_differs_from_the_last_start_of_the_run_is_known(config: RunConfig) -> None:
    """A clone in the console has the run's id, and may have other settings."""
    assert resolved(config, run_id="mine").since_last_start == []
    assert resolved(config, run_id="mine").since_last_start == []
    rate = config.train.optimizer.learning_rate
    again = resolved(config, run_id="mine", learning_rate=0.5).since_last_start
    assert again == [f"train.optimizer.learning_rate changed from {rate} to 0.5"]


def test_parameter_left_at_its_default_may_be_in_overrides(config: RunConfig) -> None:
    parameters = parameter_defaults(config)
    assert resolved(config, **parameters, overrides='{"train.epochs": 3}').config.train.epochs == 3


def test_zero_is_a_value_where_the_default_is_another(tmp_path: Path) -> None:
    config = load_run_file(ROOT / "configs/digits.yaml", [f"output.root_uri={tmp_path}", "train.max_steps=5"])
    assert resolved(config, max_steps=0).config.train.max_steps == 0
    assert "train.epochs: found 0" in refusal(config, epochs=0)


def test_a_package_that_a_program_lacks_is_named_before_a_run_has_a_folder(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text("import torch, no_such_package\n")
    (root := tmp_path / "runs").mkdir()
    own = ["train.trainer.name=mine", f"train.trainer.command=[python, {script}]", "features.cache=off"]
    config = load_run_file(ROOT / "configs/digits.yaml", [f"output.root_uri={root}", *own])
    with pytest.raises(UserError, match="imports no_such_package, which") as caught:
        resolved(config)
    assert caught.value.code == ExitCode.UNAVAILABLE
    assert not list(root.iterdir())


def test_an_upload_without_a_token_is_refused_before_a_run_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_run_file(
        ROOT / "configs/digits.yaml", [f"output.root_uri={tmp_path}", "register.hub.repo_id=team/digits"]
    )
    monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(UserError, match="no token to upload to team/digits") as caught:
        resolved(config)
    assert caught.value.code == ExitCode.NO_PERMISSION and not list(tmp_path.iterdir())
    monkeypatch.setenv("HF_TOKEN", "some token")
    assert resolved(config).config.register_.hub


def test_seed_rounded_to_a_double_is_not_a_change(tmp_path: Path) -> None:
    seed = 2**53 + 1
    config = load_run_file(ROOT / "configs/digits.yaml", [f"output.root_uri={tmp_path}", f"train.seed={seed}"])
    assert resolved(config, seed=int(float(seed))).config.train.seed == seed


def test_parameters_and_overrides_take_the_place_of_the_run_files_values(config: RunConfig) -> None:
    overrides = json.dumps({"train.micro_batch_size": 1, "evaluate": {"max_new_tokens": 5}})
    answer = resolved(
        config, data_uri="builtin:easy-vqa", epochs=2, max_steps=5, learning_rate=0.5, seed=3, resume="never",
        min_exact_match=0.25, overrides=overrides,
    ).config  # fmt: skip
    assert (answer.data.source, answer.train.epochs, answer.train.max_steps) == ("builtin:easy-vqa", 2, 5)
    assert (answer.train.optimizer.learning_rate, answer.train.seed, answer.train.resume) == (0.5, 3, "never")
    assert (answer.gate.min_exact_match, answer.train.micro_batch_size) == (0.25, 1)
    assert answer.evaluate.max_new_tokens == 5


def test_run_json_is_what_the_jobs_read(config: RunConfig, tmp_path: Path) -> None:
    answer = resolved(config, run_id="mine", epochs=7)
    assert answer.run_uri == str(tmp_path / "runs/mine")
    job = JobConfig.load(f"{answer.run_uri}/run.json")
    assert job.train.epochs == 7 and job.run.run_id == "mine" and job.run.root_uri == str(tmp_path)
    for pools in (answer.features_pools, answer.train_pools, answer.evaluate_pools):
        assert pools[0]["container_spec"]["args"][-1] == f"{answer.run_uri}/run.json"


def test_run_json_names_the_submission_for_which_resume_never_counts_once(config: RunConfig) -> None:
    def submission(**inputs: Any) -> str:
        return JobConfig.load(f"{resolved(config, run_id='mine', **inputs).run_uri}/run.json").run.submission_name

    assert submission(job_name="job-1") == submission(job_name="job-1") == "job-1", "a retried step is no other one"
    assert submission(job_name="job-2") == "job-2"
    assert submission(job_name="") != submission(job_name=""), "each call without a pipeline is one"


def test_without_a_run_id_the_job_name_is_the_run(config: RunConfig, tmp_path: Path) -> None:
    assert resolved(config).run_uri == str(tmp_path / "runs/digits-1")


def test_a_local_root_becomes_absolute(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = resolved(config.model_copy(update={"output": config.output.model_copy(update={"root_uri": "here"})}))
    assert answer.run_uri == str(tmp_path / "here/runs/digits-1")


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"overrides": '{"train.epoch": 3}'}, "train.epoch: unknown key, did you mean train.epochs?"),
        ({"overrides": "train.epochs=3"}, "parameter overrides: 1 problem\n  line 1, column 1: not JSON"),
        ({"overrides": "[1]"}, "expected a JSON object such as"),
        ({"overrides": '{"train.epochs": 3}', "epochs": 2}, "train.epochs is given as a parameter and in overrides"),
        ({"overrides": '{"train.epochs": 3, "train.epochs": 4}'}, "train.epochs: the key is given twice"),
        (
            {"overrides": '{"train": {"epochs": 3}}', "epochs": 2},
            "train.epochs is given as a parameter and in overrides",
        ),
        ({"run_file": '{"name": "a", "name": "b"}'}, "name: the key is given twice"),
        ({"run_file": "name: digits"}, "parameter run_file: 1 problem\n  line 1, column 1: not JSON"),
        ({"run_file": '"digits"'}, "expected: a run file as a JSON object"),
        ({"resume": "sometimes"}, "train.resume"),
        ({"min_exact_match": 80.0}, "gate.min_exact_match"),
        ({"run_id": "../other"}, "run_id is '../other'"),
        ({"overrides": '{"cluster.timeout": "60s"}'}, "cluster.timeout differs from the compiled pipeline"),
        ({"overrides": '{"gcp.labels": {"a": "b"}}'}, "gcp differs from the compiled pipeline"),
    ],
)
def test_a_wrong_parameter_is_refused_and_nothing_is_written(
    config: RunConfig, tmp_path: Path, inputs: dict[str, Any], words: str
) -> None:
    assert words in refusal(config, **inputs)
    assert not (tmp_path / "runs").exists()


def test_a_run_on_vertex_needs_what_vertex_needs() -> None:
    config = load_shipped(ROOT / "configs/digits.yaml")
    compiled = compiled_settings(config, "vertex", "gs://bucket/root")
    content = config.to_dict() | {"data": config.to_dict()["data"] | {"source": "samples.json"}}
    with pytest.raises(ConfigError, match=r"expected a gs:// path"):
        resolve(json.dumps(content), compiled, job_name="digits-1")


def test_a_run_on_kubeflow_is_planned_and_needs_data_that_a_pod_can_read(tmp_path: Path) -> None:
    overrides = {"cluster.reduction_server": None, "kubeflow.queue": "team"}
    answer = resolved(on_vertex(tmp_path), "kubeflow", overrides=json.dumps(overrides))
    assert Path(answer.run_uri, "plan.json").exists()
    assert json.loads(Path(answer.run_uri, "run.json").read_text(encoding="utf-8"))["kubeflow"]["queue"] == "team"
    said = refusal_on_kubeflow(on_vertex(tmp_path), data_uri="samples.json")
    assert "for Kubeflow" in said and "expected gs://bucket/folder, s3://" in said
    assert "plan is red" in refusal_on_kubeflow(on_vertex(tmp_path), overrides='{"train.strategy": "ddp"}')


def test_the_first_step_tries_whether_a_server_heeds_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ignored(store: s3.S3Storage) -> None:
        raise ConfigError(f"{store.root_uri} ignores conditions")

    monkeypatch.setattr(s3, "require_conditional_writes", ignored)
    config = on_vertex(tmp_path)
    compiled = compiled_settings(config, "kubeflow", "s3://bucket/root")
    with pytest.raises(ConfigError, match="s3://bucket/root ignores conditions"):
        resolve(json.dumps(config.to_dict()), compiled, job_name="digits-1")


def refusal_on_kubeflow(config: RunConfig, **inputs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(config, "kubeflow", **inputs)
    return str(caught.value)


def on_vertex(tmp_path: Path, *overrides: str) -> RunConfig:
    return load_run_file(
        ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml",
        [f"output.root_uri={tmp_path}", "gcp.pipeline_root=gs://bucket/folder", *overrides],
    )


def test_the_plan_is_written_beside_the_run_file(tmp_path: Path) -> None:
    plan = json.loads(Path(resolved(on_vertex(tmp_path), "vertex").run_uri, "plan.json").read_text(encoding="utf-8"))
    assert plan["name"] == "llava-7b-zero2-spot" and plan["memory"]["fits"]


def test_a_run_on_this_machine_does_not_wait_for_a_plan_that_nothing_needs(config: RunConfig) -> None:
    assert config.features.cache == "on"
    assert not Path(resolved(config).run_uri, "plan.json").exists()


def test_a_run_from_the_console_that_does_not_fit_ends_in_its_first_step(tmp_path: Path) -> None:
    """The pipeline was compiled with settings that fit; one parameter of one run changes that."""
    config = on_vertex(tmp_path)
    with pytest.raises(ConfigError, match="plan is red") as caught:
        resolved(config, "vertex", overrides=json.dumps({"train.strategy": "ddp", "cluster.reduction_server": None}))
    assert "does not fit" in caught.value.found and "train.strategy" in caught.value.fix
    assert not list(tmp_path.rglob("run.json"))


def test_a_red_plan_can_be_let_through(tmp_path: Path) -> None:
    overrides = {"train.strategy": "ddp", "plan.fail_on_error": False}
    answer = resolved(on_vertex(tmp_path), "vertex", overrides=json.dumps(overrides))
    assert json.loads(Path(answer.run_uri, "plan.json").read_text(encoding="utf-8"))["state"] == "red"


@pytest.mark.parametrize(("epochs", "state"), [(1, "off"), (3, "on")])
def test_auto_becomes_what_the_plan_finds_to_pay(config: RunConfig, epochs: int, state: str) -> None:
    answer = resolved(config, overrides=json.dumps({"features.cache": "auto"}), epochs=epochs)
    assert JobConfig.load(f"{answer.run_uri}/run.json").features.cache == state


def test_weights_in_a_bucket_are_pinned_for_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run that resumes on other bytes has another model section than its checkpoints."""
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    address, root = "gs://models/tower", f"output.root_uri={tmp_path}"
    with FakeGcs(buckets=["models"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        drawn = load_run_file(ROOT / "configs/digits.yaml", [root])
        content = {**drawn.model.tower.config, "image_size": drawn.model.image_size}
        open_storage(address).write("config.json", json.dumps(content).encode())
        config = load_run_file(ROOT / "configs/digits.yaml", [root, f"model.tower={{weights: {address}}}"])
        digests = []
        for _ in range(2):
            run = resolved(config)
            job = JobConfig.load(f"{run.run_uri}/run.json")
            assert job.model.tower.revision == run.config.model.tower.revision == revision_of(address)
            assert job.model.tower.weights == address
            digests.append(model_sha256(job))
            assert resolved(run.config).config.model == run.config.model, "a revision that is given is kept"
            open_storage(address).write("config.json", json.dumps(content, indent=1).encode())
        assert digests[0] != digests[1]
        with pytest.raises(ConfigError, match="has changed: it is at revision"):
            pinned = f"model.tower={{weights: {address}, revision: abc}}"
            resolved(load_run_file(ROOT / "configs/digits.yaml", [root, pinned]))


@pytest.fixture
def staged(tmp_path: Path) -> RunConfig:
    return load_run_file(ROOT / "configs/digits-stages.yaml", [f"output.root_uri={tmp_path}"])


def begun(config: RunConfig, target: str = "local", **inputs: Any) -> Resolved:
    """The first stage of the run r1."""
    compiled = compiled_settings(config, target, config.output.root_uri, "align")
    inputs = {"run_id": "r1", "run_file": json.dumps(config.to_dict()), **inputs}
    return resolve(inputs.pop("run_file"), compiled, **inputs)


def test_files_of_benchmarks_are_read_before_training_and_found_from_any_folder(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "set", "pope")
    monkeypatch.chdir(tmp_path)
    pope = {"name": "pope", "format": "pope", "uri": "set/questions.json", "images": "set/images"}
    overrides = {"evaluate": {"benchmarks": [pope]}}
    (found,) = resolved(config, overrides=json.dumps(overrides)).config.evaluate.benchmarks
    assert (found.uri, found.images) == (str(tmp_path / "set/questions.json"), str(tmp_path / "set/images"))
    overrides["evaluate"]["benchmarks"][0]["format"] = "chartqa"
    with pytest.raises(DataError, match="is not ChartQA's list of questions"):
        resolved(config, overrides=json.dumps(overrides))


def test_lmms_eval_is_found_from_any_folder(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    section = {"tasks": ["mine"], "include_path": "tasks", "python": sys.executable}
    overrides = json.dumps({"evaluate.lmms_eval": section})
    with pytest.raises(DataError, match="holds no task"):
        resolved(config, overrides=overrides)
    (tmp_path / "tasks/mine.yaml").write_text("task: mine")
    found = resolved(config, overrides=overrides)
    assert found.config.evaluate.lmms_eval and found.config.evaluate.lmms_eval.include_path == str(tmp_path / "tasks")
    assert [pool["replica_count"] for pool in found.benchmark_pools] == [1]
    assert resolved(config).benchmark_pools == []


def test_a_stage_before_the_last_has_a_run_folder_inside_that_of_the_run(staged: RunConfig, tmp_path: Path) -> None:
    resolved = begun(staged)
    assert resolved.run_uri == str(tmp_path / "runs/r1/stages/align")
    job = JobConfig.load(f"{resolved.run_uri}/run.json")
    assert (job.name, job.run.run_uri) == ("digits-stages-align", resolved.run_uri)
    assert job.model.freeze == ("tower", "language_model") and job.model.projector is None
    args = resolved.train_pools[0]["container_spec"]["args"]
    assert args[-1] == f"{resolved.run_uri}/run.json"


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ({"stages.finetune.data.source": "nowhere.json"}, "stage finetune: .*nowhere.json"),
        ({"stages.finetune.cluster.timeout": "3s"}, "stage finetune: cluster.timeout differs from the compiled"),
        ({"stages.finetune.train.epoch": 3}, "stages.finetune.train.epoch: unknown key"),
        ({"stages.finetune.name": "tune"}, "the run file has the stages align, tune"),
        ({"train.max_steps": 3}, "train.max_steps: stage align has its own"),
    ],
)
def test_nothing_starts_where_a_later_stage_could_not(
    overrides: dict[str, Any], found: str, staged: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=found):
        begun(staged, overrides=json.dumps(overrides))
    assert not (tmp_path / "runs").exists()


def test_on_vertex_a_red_plan_of_a_later_stage_stops_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {}

    def plan_run(config: RunConfig, stage: Stage, **_: object) -> SimpleNamespace:
        places[config.name] = (stage.is_first, stage.is_last)
        return SimpleNamespace(errors=["too large"] if config.name == "digits-stages" else [], memory=None)

    monkeypatch.setattr("vlmpipe.planner.plan.plan_run", plan_run)
    staged = load_shipped(ROOT / "configs/digits-stages.yaml", ["output.root_uri=gs://bucket/root"])
    with pytest.raises(ConfigError, match="stage finetune: the plan is red"):
        begun(staged, "vertex")
    assert places == {"digits-stages": (False, True)}, "later stages first"


def test_a_parameter_is_for_all_stages_without_a_value_of_their_own(staged: RunConfig, tmp_path: Path) -> None:
    parameters = parameter_defaults(staged) | {"seed": 7, "resume": "never"}
    assert begun(staged, **parameters).config.train.seed == 7
