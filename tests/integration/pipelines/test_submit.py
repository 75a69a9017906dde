"""`vlmpipe submit` with Google's real client against a strict server of our own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.auth.credentials import AnonymousCredentials
from google.cloud import aiplatform
from google.cloud.aiplatform.utils import gcs_utils
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from tests.fakes.vertex.server import FakeVertex
from tests.support.analysed_models import keep_analyses
from tests.support.short_form import chosen
from tests.support.terminal import Terminal
from tests.support.vertex.submit_runs import CONFIG, DEAR, MINE, RED, Submit, running_vertex, submitter
from vlmpipe.cli.skill.effects import load_effects
from vlmpipe.config.run_config import load_run_file
from vlmpipe.google_cloud.client import ENDPOINT_VARIABLE
from vlmpipe.platforms.vertex import pipeline_job as vertex_job
from vlmpipe.rehearsal.serve import rehearsal
from vlmpipe.rehearsal.vertex.server import BILLING_LABEL
from vlmpipe.runs import submitted, watch
from vlmpipe.runs.submitted import run_records

NETWORK = "projects/123/global/networks/net"


@pytest.fixture
def vertex(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    with running_vertex(monkeypatch) as server:
        yield server


@pytest.fixture
def vlmpipe_submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Submit:
    return submitter(tmp_path, monkeypatch, capfd)


def _only_job(vertex: FakeVertex) -> dict[str, Any]:
    (job,) = vertex.jobs.values()
    return json_format.MessageToDict(type(job).pb(job))


def test_the_compiled_file_is_what_arrives(vertex: FakeVertex, vlmpipe_submit: Submit, tmp_path: Path) -> None:
    answer = vlmpipe_submit("train.epochs=2")
    assert (answer.code, answer.err) == (0, "")
    compiled = yaml.safe_load((tmp_path / "build/pipelines/llava-7b-zero2-spot.vertex.yaml").read_text())
    assert _only_job(vertex)["pipelineSpec"] == compiled
    run_file = json.loads(compiled["root"]["inputDefinitions"]["parameters"]["run_file"]["defaultValue"])
    assert run_file["train"]["epochs"] == 2


def test_all_placement_settings_are_in_the_manifest(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    key = "projects/test-project/locations/us-central1/keyRings/ring/cryptoKeys/key"
    vlmpipe_submit(f"gcp.network={NETWORK}", "gcp.labels={team: vision}", f"gcp.encryption_spec_key_name={key}")
    job = _only_job(vertex)
    assert job["displayName"] == "llava-7b-zero2-spot"
    assert job["serviceAccount"] == "vlmpipe@example-project.iam.gserviceaccount.com"
    assert job["network"] == NETWORK
    assert job["encryptionSpec"] == {"kmsKeyName": key}
    assert job["labels"].pop(vertex_job.SUBMISSION_LABEL)
    assert job["labels"].pop(BILLING_LABEL), "the service adds it"
    assert job["labels"] == {"team": "vision"}
    assert job["runtimeConfig"] == {
        "gcsOutputDirectory": "gs://example-bucket/vlmpipe",
        "failurePolicy": "PIPELINE_FAILURE_POLICY_FAIL_FAST",
    }


def test_a_private_interface_arrives(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    vlmpipe_submit("gcp.psc_interface_config={network_attachment: attachment}")
    assert _only_job(vertex)["pscInterfaceConfig"] == {"networkAttachment": "attachment"}


def test_an_earlier_run_is_named_as_the_pipelines_parameter(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    answer = vlmpipe_submit("--run-id", "earlier-run", "--json").json
    assert _only_job(vertex)["runtimeConfig"]["parameterValues"] == {"run_id": "earlier-run"}
    assert answer["run_uri"] == "gs://example-bucket/vlmpipe/runs/earlier-run"


def test_a_run_id_that_is_no_folders_name_is_refused(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    answer = vlmpipe_submit("--run-id", "../other")
    assert (answer.code, "run_id is '../other'" in answer.err, vertex.requests) == (64, True, [])


def test_the_diagnosis_links_the_console(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    answer = vlmpipe_submit("--json", "train.epochs=2").json
    (name,) = vertex.jobs
    job_id = name.rpartition("/")[2]
    assert list(run_records()[job_id].source) == [CONFIG, MINE, "train.epochs=2"], "what would continue it"
    assert (answer["sent"], answer["resource_name"]) == (True, name)
    assert f"/us-central1/pipelines/runs/{job_id}?project=test-project" in answer["console_url"]
    assert answer["run_uri"] == f"gs://example-bucket/vlmpipe/runs/{job_id}"


def test_text_output_has_the_same_diagnosis(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    said = vlmpipe_submit().out
    (name,) = vertex.jobs
    assert said.startswith(f"{name.rpartition('/')[2]} is started on Vertex AI\n")
    for part in (name, "https://console.cloud.google.com/", "build/pipelines/", "about $20.00 on 1 x a2-highgpu-1g",
                 "32 of custom_model_training_preemptible_nvidia_a100_80gb_gpus"):  # fmt: skip
        assert part in said


def test_it_sends_what_googles_own_submit_sends(
    vertex: FakeVertex, vlmpipe_submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlmpipe_submit(f"gcp.network={NETWORK}", "gcp.labels={team: vision}", "--run-id", "earlier")
    (ours,) = vertex.jobs.values()
    # It looks for the bucket, and outside Google Cloud it does so for minutes.
    monkeypatch.setattr(
        gcs_utils, "create_gcs_bucket_for_pipeline_artifacts_if_it_does_not_exist", lambda **options: None
    )
    settings = aiplatform.initializer.global_config
    monkeypatch.setattr(settings, "_api_endpoint", vertex.endpoint)
    monkeypatch.setattr(settings, "_api_transport", "rest")
    aiplatform.PipelineJob(
        display_name=ours.display_name,
        template_path=str(tmp_path / "build/pipelines/llava-7b-zero2-spot.vertex.yaml"),
        job_id="theirs",
        pipeline_root="gs://example-bucket/vlmpipe",
        parameter_values={"run_id": "earlier"},
        enable_caching=False,
        labels=dict(ours.labels),
        failure_policy="fast",
        project="test-project",
        location="us-central1",
        credentials=AnonymousCredentials(),
    ).submit(service_account=ours.service_account, network=NETWORK)
    theirs = vertex.jobs[f"{vertex.parent}/pipelineJobs/theirs"]
    assert _compared(ours) == _compared(theirs)


def _compared(job: Any) -> tuple[dict[str, Any], pipeline_spec_pb2.PipelineSpec]:
    """A job without its name, and its pipeline as kfp's message, where "no cache" is said by saying nothing."""
    content = json_format.MessageToDict(type(job).pb(job))
    for field in ("name", "createTime", "updateTime"):
        del content[field]
    del content["labels"][BILLING_LABEL]  # the service's own
    spec = json_format.ParseDict(content.pop("pipelineSpec"), pipeline_spec_pb2.PipelineSpec())
    for task in _tasks(spec):
        if not task.caching_options.enable_cache:
            task.ClearField("caching_options")
    return content, spec


def _tasks(spec: pipeline_spec_pb2.PipelineSpec) -> list[Any]:
    dags = [spec.root.dag, *(component.dag for component in spec.components.values())]
    return [task for dag in dags for task in dag.tasks.values()]


def test_no_step_is_cached_by_the_service(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    vlmpipe_submit()
    (job,) = vertex.jobs.values()
    tasks = _tasks(_compared(job)[1])
    assert len(tasks) > 10
    assert [task.task_info.name for task in tasks if task.HasField("caching_options")] == []


@pytest.mark.parametrize("name", ["a234", "a" + "b" * 62])
def test_the_name_of_a_job_is_one_that_vertex_takes(name: str) -> None:
    config = load_run_file(CONFIG, [f"name={name}"])
    job_id = submitted.job_id_at(config, datetime(2026, 11, 20, 3, 4, 5))
    assert re.fullmatch(rf"{name}-20261120-030405-[0-9a-f]{{6}}", job_id)
    assert len(job_id) <= 128


# What keeps it from being sent


def test_a_red_plan_sends_nothing(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    answer = vlmpipe_submit("--yes", plan=RED)
    assert (answer.code, vertex.requests) == (64, [])
    assert "VP101 machine_type: no such machine" in answer.err


def test_a_red_plan_is_sent_when_forced(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    assert (vlmpipe_submit("--force", plan=RED).code, len(vertex.jobs)) == (0, 1)


@pytest.mark.slow
def test_the_planners_own_errors_send_nothing_and_force_does_not_help(
    vertex: FakeVertex, vlmpipe_submit: Submit
) -> None:
    answers = [
        vlmpipe_submit("cluster.machine_type=n1-standard-4", *flags, plan=None) for flags in ((), ("--force", "--yes"))
    ]
    assert [answer.code for answer in answers] == [64, 64]
    assert ["n1-standard-4" in answer.err for answer in answers] == [True, True]
    assert "not submitted: the plan of llava-7b-zero2-spot is red" in answers[0].err
    assert vertex.requests == []


TOO_MUCH_MEMORY = ("train.activation_checkpointing=none", "train.micro_batch_size=8", "train.global_batch_size=256")


@pytest.mark.slow
def test_too_little_memory_sends_nothing_unless_forced(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    answer = vlmpipe_submit(*TOO_MUCH_MEMORY, "--yes", plan=None)
    assert (answer.code, vertex.requests, "does not fit" in answer.err) == (64, [], True)
    assert (vlmpipe_submit(*TOO_MUCH_MEMORY, "--yes", "--force", plan=None).code, len(vertex.jobs)) == (0, 1)


def test_the_planners_own_cost_is_asked_about(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    answer = vlmpipe_submit("plan.samples=665000", "plan.sample_tokens=800", plan=None)
    assert (answer.code, vertex.requests) == (64, [])
    assert "is planned to cost $" in answer.err


def test_a_dear_plan_without_a_terminal_sends_nothing(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    answer = vlmpipe_submit(plan=DEAR)
    assert (answer.code, vertex.requests, "add --yes" in answer.err) == (64, [], True)


def test_a_dear_plan_is_sent_with_a_yes(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    assert (vlmpipe_submit("--yes", plan=DEAR).code, len(vertex.jobs)) == (0, 1)


ANSWERS = {"no": ("n\n", 130, 0), "Ctrl-C": ("\x03", 130, 0), "yes": ("y\n", 0, 1)}
ANSWERS_TRIED = chosen(ANSWERS, lambda name: name == "yes")


@pytest.mark.parametrize(("typed", "code", "jobs"), ANSWERS_TRIED.values(), ids=ANSWERS_TRIED)
def test_in_a_terminal_the_answer_decides(vertex: FakeVertex, tmp_path: Path, typed: str, code: int, jobs: int) -> None:
    changes = (MINE, "plan.confirm_above_usd=0")
    keep_analyses(load_run_file(CONFIG, changes), here=False)
    with Terminal(tmp_path, "submit", CONFIG, *changes, "--detach") as terminal:
        terminal.when(lambda: "[y/N]" in terminal.said)
        assert vertex.requests == []
        terminal.type(typed)
        answer = terminal.answer()
    assert (answer.code, len(vertex.jobs)) == (code, jobs)
    assert ("nothing was sent" in answer.words) == (jobs == 0)
    assert "Traceback" not in answer.said


@pytest.mark.parametrize("tasks", [1, 3])
def test_a_run_can_be_rehearsed_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tasks: int
) -> None:
    monkeypatch.setattr(watch, "SERVICE_POLL_S", 0.0)
    monkeypatch.setenv(ENDPOINT_VARIABLE, "http://localhost:1")
    overrides = [f"data.tasks={tasks}"]
    with rehearsal(load_run_file(CONFIG, [MINE, *overrides])) as servers:
        for name, value in servers.environment.items():
            monkeypatch.setenv(name, value)
        options = ("--api-endpoint", servers.vertex.endpoint, "submit", "--plain")
        answer = submitter(tmp_path, monkeypatch, capfd, *options)(*overrides)
        (job,) = servers.vertex.jobs.values()
    assert answer.code == 0, answer.err
    assert job.state.name == "PIPELINE_STATE_SUCCEEDED"
    sharing = {"plan-data", "prepare-chunks"} & {task.task_name for task in job.job_detail.task_details}
    assert (len(sharing), "plan-data is running" in answer.out) == ((2, True) if tasks > 1 else (0, False))


def test_a_dry_run_sends_nothing_and_prints_the_request(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    answer = vlmpipe_submit("--dry-run", "--json", plan=DEAR).json
    assert set(load_effects()["submit"].json) <= answer.keys()
    assert (answer["sent"], answer["resource_name"], vertex.requests) == (False, None, [])
    assert answer["request"]["parent"] == vertex.parent
    assert answer["request"]["pipelineJob"]["runtimeConfig"]["gcsOutputDirectory"] == "gs://example-bucket/vlmpipe"
    assert "$412" in answer["plan"]["needs_a_yes"]
    said = vlmpipe_submit("--dry-run", plan=DEAR)
    assert (said.code, "Nothing was sent" in said.out, '"pipelineJobId"' in said.out) == (0, True, True)


def test_a_dry_run_of_a_red_plan_is_refused_like_the_real_one(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    assert (vlmpipe_submit("--dry-run", plan=RED).code, vlmpipe_submit("--dry-run", "--force", plan=RED).code) == (
        64,
        0,
    )


def test_the_example_project_is_refused(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    answer = vlmpipe_submit(project="gcp.project=example-project")
    assert (answer.code, vertex.requests) == (64, [])
    assert "shipped example" in answer.err


def test_data_of_this_machine_is_refused_before_anything_else(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    answer = vlmpipe_submit("data.source=here.json")
    assert (answer.code, vertex.requests, "data.source" in answer.err) == (64, [], True)
