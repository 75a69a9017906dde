"""`notify`: what may stand in the run file, what is told, and that nothing that goes wrong there is an error."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from kfp.dsl import PipelineTaskFinalStatus

from tests.fakes.receiver import Receiver
from tests.support.paths import ROOT
from vlmpipe.components.notify import notify
from vlmpipe.components.runtime import webhook
from vlmpipe.components.runtime.folder_lock import RUNNING, Holder, read_holder, take_folder
from vlmpipe.config.run_config import load_run_file
from vlmpipe.records.decision import Decision
from vlmpipe.runs.ending import Ending
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.local import LocalStorage

DIGITS = ROOT / "configs/digits.yaml"
SECRET = "projects/my-project/secrets/chat"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr(webhook, "PAUSES_S", (0.0, 0.0))
    with Receiver() as server:
        monkeypatch.setattr("vlmpipe.trainer.secret_manager.SECRET_MANAGER", server.endpoint)
        yield server


RUN = "gs://bucket/runs/r1"
FAILED = Ending("failed", "train", 65, "loss is nan\nmore")


def test_a_failure_message_has_step_code_and_error(receiver: Receiver) -> None:
    assert webhook.send_notification(receiver.endpoint, RUN, FAILED) == "webhook notified (200)"
    (message,) = receiver.messages
    told = {key: message[key] for key in ("run_id", "outcome", "step", "exit_code", "error")}
    assert told == {"run_id": "r1", "outcome": "failed", "step": "train", "exit_code": 65, "error": "loss is nan"}
    link = "https://storage.cloud.google.com/bucket/runs/r1/report.html"
    assert message["text"] == f"Run r1: failed in train. loss is nan\n{link}"


def test_a_decision_message_has_its_reason_and_what_the_service_says_otherwise() -> None:
    decision = Decision(accepted=True, reason="above the champion")
    message = webhook.message_of(RUN, Ending("done", decision=decision, version=3, note="the service reports FAILED"))
    told = (message["outcome"], message["accepted"], message["reason"], message["version"], message["note"])
    assert told == ("done", True, "above the champion", 3, "the service reports FAILED")
    assert message["text"].startswith("Run r1: done. above the champion. the service reports FAILED\n")


def test_a_run_that_was_stopped_says_where() -> None:
    message = webhook.message_of(RUN, Ending("stopped", "train", 75, "train was stopped on request"))
    assert message["text"].startswith("Run r1: stopped in train. train was stopped on request\n")
    assert webhook.message_of(RUN, Ending("stopped"))["text"].startswith("Run r1: stopped\n")


def test_the_address_is_read_from_secret_manager(receiver: Receiver) -> None:
    receiver.secrets = {f"{SECRET}/versions/latest": f"{receiver.endpoint}/a\n", f"{SECRET}/versions/3": "http://no:1"}
    assert webhook.send_notification(SECRET, RUN, FAILED) == "webhook notified (200)"
    assert "the connection failed" in webhook.send_notification(f"{SECRET}/versions/3", RUN, FAILED)


@pytest.mark.parametrize(
    ("codes", "said", "messages"),
    [
        ([503, 429], "webhook notified (200)", 1),
        ([500, 500, 500], "webhook NOT notified: it answers 500", 0),
        ([404], "webhook NOT notified: it answers 404", 0),
        ([302], "webhook NOT notified: it answers 302", 0),
    ],
)
def test_unreachable_webhook_is_reported(receiver: Receiver, codes: list[int], said: str, messages: int) -> None:
    receiver.codes = codes
    told = webhook.send_notification(receiver.endpoint, RUN, FAILED)
    assert (told, len(receiver.messages)) == (said, messages)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("projects/p/secrets/forbidden", "roles/secretmanager.secretAccessor"),
        ("projects/p/secrets/missing", "Secret Manager answers 404"),
        ("http://127.0.0.1:{port}/very-private", "the connection failed"),
        ("not an address", "MissingSchema"),
    ],
)
def test_what_cannot_be_reached_is_a_sentence_without_the_address(receiver: Receiver, name: str, said: str) -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        told = webhook.send_notification(name.format(port=taken.getsockname()[1]), RUN, FAILED)
    assert told.startswith("webhook NOT notified: ") and said in told and "very-private" not in told


def test_a_silent_webhook_is_not_waited_for_again(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "TIMEOUT_S", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        told = webhook.send_notification(f"http://127.0.0.1:{silent.getsockname()[1]}", RUN, FAILED)
    assert told == "webhook NOT notified: no answer within 0.1 s"


def test_without_a_webhook_there_is_no_message() -> None:
    assert webhook.send_notification("", RUN, FAILED) == ""


@pytest.mark.parametrize(
    ("address", "keys"),
    [
        ("https://hooks.slack.com/services/a", {"text"}),
        ("https://discord.com/api/webhooks/a", {"content"}),
        ("https://ci.example.com/hook", {"text", "run_id"}),
    ],
)
def test_each_receiver_gets_what_it_takes(address: str, keys: set[str]) -> None:
    assert webhook.body_for(address, {"text": "t", "run_id": "r"}).keys() == keys


@pytest.mark.parametrize("value", ["", SECRET, f"{SECRET}/versions/7", "https://ci.example.com/vlmpipe/runs",
                                   "http://localhost:8080/hook"])  # fmt: skip
def test_what_may_stand_in_the_run_file(value: str) -> None:
    assert load_run_file(DIGITS, [f"notify.webhook={value}"]).notify.webhook == value


HIDDEN = "T0AB1CD2E-B0AB1CD2E3F-xYz9"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (f"https://hooks.slack.com/services/{HIDDEN}", "holds a secret"),
        (f"https://me:{HIDDEN}@ci.example.com/", "holds a secret"),
        (f"https://ci.example.com/hook?token={HIDDEN}", "holds a secret"),
        (f"https://ci.example.com/hook?sig={HIDDEN}", "holds a secret"),
        (f"https://ci.example.com/hooks/{HIDDEN}0123456789", "holds a secret"),
        (f"http://ci.example.com/{HIDDEN}", "https://"),
        (f"ftp://ci.example.com/{HIDDEN}", "https:// address"),
        ("projects/p/secrets", "https:// address"),
    ],
)
def test_what_may_not_is_refused_without_being_repeated(value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"notify\.webhook") as caught:
        load_run_file(DIGITS, [f"notify.webhook={value}"])
    assert said in str(caught.value) and HIDDEN not in str(caught.value)


@pytest.mark.parametrize("value", ["[me]", "[a@b]", "[a@b.c, a@b.c, a@b.c, a@b.c]"])
def test_recipients_that_the_service_would_not_take_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"notify\.email"):
        load_run_file(DIGITS, [f"notify.email={value}"])


def test_a_link_is_percent_encoded() -> None:
    message = webhook.message_of("gs://bucket/größe a#1/runs/r?1", FAILED)
    link = message["text"].splitlines()[-1]
    assert link == "https://storage.cloud.google.com/bucket/gr%C3%B6%C3%9Fe%20a%231/runs/r%3F1/report.html"


@pytest.mark.parametrize("run_id", ["../x", "my run", "a/b", "x\n", "{{$.pipeline_job_name}}"])
def test_the_exit_handler_writes_nothing_for_a_run_id_that_is_refused(
    run_id: str, receiver: Receiver, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    status = PipelineTaskFinalStatus("FAILED", "projects/p/j", "run", 1, "resolve-run failed")
    notify(run_id, "job-1", str(root), receiver.endpoint, "register-model", status)
    (message,) = receiver.messages
    assert (message["outcome"], message["step"], message["exit_code"]) == ("failed", "resolve-run", 64)
    assert "run_id is" in message["text"] and list(tmp_path.rglob("*")) == [root]


def test_the_exit_handler_of_a_job_that_was_refused_leaves_the_holders_folder_as_it_is(
    receiver: Receiver, tmp_path: Path
) -> None:
    run = LocalStorage(tmp_path / "runs/one")
    take_folder(run, Holder("job-1", "vertex"), lambda _: RUNNING)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    status = PipelineTaskFinalStatus("FAILED", "projects/p/j", "run", 1, "resolve-run failed")
    notify("one", "job-2", str(tmp_path), receiver.endpoint, "register-model", status)
    (message,) = receiver.messages
    assert (message["outcome"], message["step"], message["exit_code"]) == ("failed", "resolve-run", 69)
    assert "pipeline job job-1 holds the run's folder" in message["text"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    notify("one", "job-1", str(tmp_path), "", "register-model", status)
    holder, _ = read_holder(run)
    assert holder and holder.closed and run.stat("steps/notify.json")
