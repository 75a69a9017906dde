"""A fourth platform is a folder, `tests/support/toy_platform`, and a line of the table: the commands then know it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.command_line import Answer
from tests.support.paths import ROOT
from tests.support.pipelines.job_specs import CPU
from tests.support.reports import make_run, write_json
from tests.support.toy_platform.platform import Toy
from tests.support.vertex.search_runs import config as search_config
from tests.support.vertex.search_runs import opened
from vlmpipe.cli import app as cli
from vlmpipe.components.runtime.deploy import deploy_run
from vlmpipe.components.runtime.jobs_on_targets import run_job_of_run
from vlmpipe.config.run_config import load_run_file
from vlmpipe.platforms.find import find
from vlmpipe.platforms.job_step import run_custom_job
from vlmpipe.platforms.table import DEFAULT, PLATFORMS, Line, here, platform_of, searching, services
from vlmpipe.runs import submitted
from vlmpipe.serving.questions import validation_questions
from vlmpipe.trainer.config.job import RunPaths
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage.records import read_record_file

CONFIG = str(ROOT / "configs/digits.yaml")
RUN = "toys-20260101-000000-abcdef"
TO_TOY = ("--target", "toy")
Call = Callable[..., Answer]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy's folder, with its line in the table."""
    folder = tmp_path / "toy"
    folder.mkdir()
    monkeypatch.setattr(Toy, "folder", folder, raising=False)
    monkeypatch.setitem(PLATFORMS, "toy", Line("tests.support.toy_platform.platform:Toy", searches=True))
    monkeypatch.setattr(submitted, "SUBMITTED", tmp_path / "submitted")
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def call(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Run a command as a shell does."""

    def vlmpipe(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["vlmpipe", *arguments])
        monkeypatch.setenv(cli.DEBUG_VARIABLE, "")
        with pytest.raises(SystemExit) as caught:
            cli.main()
        code = caught.value.code
        return Answer(code if isinstance(code, int) else 0 if code is None else 1, *capfd.readouterr())

    return vlmpipe


def test_a_run_is_submitted_found_read_and_cancelled_there(folder: Path, call: Call) -> None:
    sent = call("submit", CONFIG, "name=toys", *TO_TOY, "--detach", "--json")
    assert sent.code == 0 and sent.json == {"sent": True, "pipeline": str(folder / "pipeline.yaml")}, sent
    pipeline = (folder / "pipeline.yaml").read_text()
    assert (
        "def run_custom_job(" in pipeline and "constant: toy" in pipeline and "gcp_launcher" not in pipeline
    )  # by the toy's graph, not by another's
    assert call("status", RUN, "--json").json == {"run": RUN, "outcome": "running"}
    assert f"toy run {RUN}: running" in call("status", "@last:toys").out
    assert call("logs", RUN).out == "train: step 1\n"
    line = {"time": None, "step": "train", "process": "rank-0", "text": "step 1"}
    assert json.loads(call("logs", RUN, "--json").out) == line
    again = call("submit", CONFIG, "name=toys", *TO_TOY, "--run-id", "@last", "--detach", "--json")
    assert again.code == 0 and [path.stem for path in folder.glob("*.json")] == [RUN], "it continues its own run"
    assert call("cancel", RUN, "--json").json == {"run_id": RUN, "asked": True}
    watched = call("status", RUN, "--watch", "--plain")
    assert watched.code == ExitCode.PREEMPTED and f"toy run {RUN}: stopped" in watched.out


def test_a_run_that_failed_is_diagnosed(folder: Path, call: Call) -> None:
    log = ["step 1", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."]
    (folder / "toys-1.json").write_text(json.dumps({"state": "failed", "log": log}))
    diagnosis = call("diagnose", "toys-1", "--json").json
    assert (diagnosis["outcome"], diagnosis["step"], diagnosis["exit_code"]) == ("failed", "train", 65)
    assert diagnosis["cause"] and "the toy's log" in json.dumps(diagnosis)


def test_jobs_without_a_pipeline_are_sent_there(folder: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(CPU))
    place = ("--project", "mine", "--location", "us-central1")
    sent = call("submit", "--job-spec", str(tmp_path / "mine.yaml"), *TO_TOY, *place, "--yes", "--detach", "--json")
    assert sent.code == 0, sent
    assert (sent.json["resource_name"], sent.json["endpoint"]) == ("toy://jobs/mine-job", "toy://mine/us-central1")
    assert call("status", "mine-job", "--json").json["outcome"] == "running"
    alone = call("submit", CONFIG, "--only", "train", *TO_TOY, "--dry-run", "--json")
    assert alone.code == 0 and alone.json["request"]["job"] == "digits-train-job", alone
    mail = call("submit", CONFIG, "notify.email=[me@example.com]", "--only", "train", *TO_TOY, "--dry-run")
    assert mail.code == 64 and "notify.email" in mail.err
    files = call("submit", CONFIG, "data.source=here/train.json", "--only", "train", *TO_TOY, "--dry-run")
    assert files.code == 64 and "expected a toy:// path" in files.err


def test_a_search_is_sent_and_found_there(folder: Path, call: Call, tmp_path: Path) -> None:
    config = search_config()
    opened(config, folder / "bucket")
    (tmp_path / "search.yaml").write_text(yaml.safe_dump(config.to_dict()))
    sent = call("tune", str(tmp_path / "search.yaml"), "--from", "base", *TO_TOY, "--yes", "--json")
    assert sent.code == 0, sent
    name = sent.json["search_id"]
    assert sent.json["resource_name"] == f"toy://searches/{name}"
    assert call("status", name, "--json").json["num_trials"] == 6
    assert call("cancel", name, "--json").json == {"run_id": name, "asked": True}


def test_check_says_what_it_says_of_a_run_file(call: Call) -> None:
    states = {finding["subject"]: finding["text"] for finding in call("check", CONFIG, "--json").json["checks"]}
    assert states["toy"] == "fits the toy"


def test_a_schedule_is_made_changed_and_deleted_there(folder: Path, call: Call) -> None:
    hourly = (CONFIG, "schedule.cron=0 * * * *", *TO_TOY)
    assert "not there; apply creates it" in call("schedule", "plan", *hourly).out
    made = call("schedule", "apply", *hourly, "--yes")
    assert made.code == 0 and "toy://schedules/digits" in made.out and "the toy's bucket is a folder" in made.out
    assert [live["name"] for live in call("schedule", "list", *hourly, "--json").json["schedules"]] == ["digits"]
    assert (
        "change    cron_line: 0 * * * * -> 0 3 * * *"
        in call("schedule", "plan", CONFIG, "schedule.cron=0 3 * * *", *TO_TOY).out
    )
    assert call("schedule", "pause", *hourly, "--json").json["state"] == "paused"
    assert call("schedule", "resume", *hourly, "--yes", "--json").json["state"] == "active"
    assert call("schedule", "delete", *hourly, "--json").json == {"deleted": "toy://schedules/digits"}
    assert list(folder.glob("*.schedule")) == []


def test_a_pipeline_is_published_and_started_from_there(folder: Path, call: Call) -> None:
    done = call("publish", CONFIG, *TO_TOY, "--json")
    assert done.code == 0 and done.json == {"published": [{"template": "https://toy.example/digits"}]}, done
    sent = call("submit", "https://toy.example/digits", *TO_TOY, "--detach", "--json")
    assert sent.json == {"sent": True, "pipeline": str(folder / "digits.published.yaml")}


def test_a_model_is_deployed_there_if_it_answers_as_evaluated(folder: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_json(next((tmp_path / "prepared").iterdir()) / "tokenizer/chat.json", {"as_text": True})
    settings = json.loads((run / "run.json").read_text())
    write_json(run / "run.json", {**settings, "deploy": {"endpoint": "digits", "smoke_questions": 3}})
    assert deploy_run(str(run), "toy").asked == 3 and read_record_file(run / "deployed.json")["toy"] == "digits"
    (run / "deployed.json").unlink()
    question = validation_questions(str(run), 3)[0]
    Toy.answers = {question.id: "something else"}
    try:
        with pytest.raises(UserError) as refused:
            deploy_run(str(run), "toy")
    finally:
        Toy.answers = {}
    assert refused.value.code == ExitCode.REJECTED and not (run / "deployed.json").exists()


def test_a_job_of_a_run_and_the_job_of_a_step_are_run_there(folder: Path) -> None:
    (run := folder / "runs/mine").mkdir(parents=True)
    paths = RunPaths(run_id="mine", root_uri=str(folder))
    write_json(run / "run.json", load_run_file(CONFIG).to_run_json(paths))
    assert run_job_of_run(str(run), "train", "toy") == '{"toy": "digits-train", "pools": 2}'
    pools = CPU["worker_pool_specs"]
    assert run_custom_job("toy", "digits-train", worker_pool_specs=pools) == ('{"toy": "digits-train", "pools": 1}',)


def test_a_step_asks_whether_another_run_has_ended_there(folder: Path) -> None:
    (folder / "toys-1.json").write_text('{"state": "done"}')
    toy = platform_of("toy")
    assert toy.is_over("toys-1", toy.job_place({})) is True


def test_a_name_that_is_not_in_the_table_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError) as caught:
        platform_of("slurm")
    assert caught.value.expected == "one of vertex, kubeflow, local"


def test_the_table_says_which_commands_know_a_platform(folder: Path) -> None:
    assert services() == ["vertex", "kubeflow", "toy"] and searching() == ["toy", "local", "vertex"]
    assert DEFAULT == "vertex" and here().name == "local"


def test_without_its_line_nothing_knows_the_platform(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "toys-1.json").write_text('{"state": "running"}')
    assert find("toys-1", root="runs", project="", location="").asks == "the toy service"
    monkeypatch.delitem(PLATFORMS, "toy")
    with pytest.raises(Exception, match="no run 'toys-1'"):
        find("toys-1", root="runs", project="", location="")
