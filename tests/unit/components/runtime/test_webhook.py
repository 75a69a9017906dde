"""`notify`: what may stand in the run file, what is told, and that nothing that goes wrong there is an error."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from components.runtime import webhook
from tests.fakes.receiver import Receiver
from tests.support.paths import ROOT
from trainer.errors import ConfigError
from trainer.progress import StepRecord
from vlmpipe.config.run_config import load_run_file

DIGITS = ROOT / "configs/digits.yaml"
SECRET = "projects/my-project/secrets/chat"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr(webhook, "PAUSES_S", (0.0, 0.0))
    with Receiver() as server:
        monkeypatch.setattr("trainer.secret_manager.SECRET_MANAGER", server.address)
        yield server


@pytest.fixture
def failed_run(tmp_path: Path) -> str:
    run = tmp_path / "runs" / "r1"
    (run / "steps").mkdir(parents=True)
    for started_s, step, state, message in (
        (1.0, "prepare-data", "done", ""), (3.0, "decide", "failed", "a consequence"),
        (2.0, "train", "failed", "loss is nan\nmore"),
    ):  # fmt: skip
        record = StepRecord(step, state, started_s=started_s, message=message, detail={"exit_code": 65})
        (run / "steps" / f"{step}.json").write_text(json.dumps(asdict(record)))
    return str(run)


def test_a_failure_message_has_step_code_and_error(receiver: Receiver, failed_run: str) -> None:
    assert webhook.send_notification(receiver.address, failed_run, "FAILED") == "webhook notified (200)"
    (message,) = receiver.messages
    told = {key: message[key] for key in ("run_id", "outcome", "step", "exit_code", "error")}
    assert told == {"run_id": "r1", "outcome": "failed", "step": "train", "exit_code": 65, "error": "loss is nan"}
    assert message["text"].startswith("Run r1: failed in train. loss is nan\n")


def test_what_a_stage_ended_is_reported_as_its_own(tmp_path: Path) -> None:
    run = tmp_path / "r1"

    def record(folder: Path, step: str, state: str, started_s: float) -> None:
        (folder / "steps").mkdir(parents=True, exist_ok=True)
        content = asdict(StepRecord(step, state, started_s=started_s, message="loss is nan", detail={"exit_code": 65}))
        (folder / f"steps/{step}.json").write_text(json.dumps(content))

    align = run / "stages/align"
    record(run, "train", "failed", 1.0)  # in an earlier attempt
    record(align, "resolve-run", "done", 2.0)
    record(align, "train", "failed", 3.0)
    assert webhook.message_of(str(run), "FAILED")["step"] == "align-train"
    record(align, "decide", "done", 4.0)
    (align / "decision.json").write_text('{"accepted": false, "reason": "loss 7 is above 6"}')
    message = webhook.message_of(str(run), "SUCCEEDED")
    assert (message["accepted"], message["reason"]) == (False, "loss 7 is above 6")


def test_a_run_without_files_is_reported_with_the_services_message(receiver: Receiver, tmp_path: Path) -> None:
    webhook.send_notification(receiver.address, str(tmp_path / "nothing"), "FAILED", "the image cannot be pulled")
    assert receiver.messages[0]["error"] == "the image cannot be pulled"


def test_a_decision_message_has_its_reason(receiver: Receiver, tmp_path: Path) -> None:
    (tmp_path / "decision.json").write_text('{"accepted": true, "reason": "above the champion"}')
    webhook.send_notification(receiver.address, str(tmp_path), "SUCCEEDED")
    message = receiver.messages[0]
    assert (message["outcome"], message["accepted"], message["reason"]) == ("done", True, "above the champion")


def test_the_address_is_read_from_secret_manager(receiver: Receiver, failed_run: str) -> None:
    receiver.secrets = {f"{SECRET}/versions/latest": f"{receiver.address}/a\n", f"{SECRET}/versions/3": "http://no:1"}
    assert webhook.send_notification(SECRET, failed_run, "FAILED") == "webhook notified (200)"
    assert "the connection failed" in webhook.send_notification(f"{SECRET}/versions/3", failed_run, "FAILED")


@pytest.mark.parametrize(
    ("codes", "said", "messages"),
    [
        ([503, 429], "webhook notified (200)", 1),
        ([500, 500, 500], "webhook NOT notified: it answers 500", 0),
        ([404], "webhook NOT notified: it answers 404", 0),
        ([302], "webhook NOT notified: it answers 302", 0),
    ],
)
def test_unreachable_webhook_is_reported(
    receiver: Receiver, failed_run: str, codes: list[int], said: str, messages: int
) -> None:
    receiver.codes = codes
    assert (webhook.send_notification(receiver.address, failed_run, "FAILED"), len(receiver.messages)) == (
        said,
        messages,
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("projects/p/secrets/forbidden", "roles/secretmanager.secretAccessor"),
        ("projects/p/secrets/missing", "Secret Manager answers 404"),
        ("http://127.0.0.1:{port}/very-private", "the connection failed"),
        ("not an address", "MissingSchema"),
    ],
)
def test_what_cannot_be_reached_is_a_sentence_without_the_address(
    receiver: Receiver, failed_run: str, name: str, said: str
) -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        told = webhook.send_notification(name.format(port=taken.getsockname()[1]), failed_run, "FAILED")
    assert told.startswith("webhook NOT notified: ") and said in told and "very-private" not in told


def test_a_silent_webhook_is_not_waited_for_again(
    receiver: Receiver, failed_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "TIMEOUT_S", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        told = webhook.send_notification(f"http://127.0.0.1:{silent.getsockname()[1]}", failed_run, "FAILED")
    assert told == "webhook NOT notified: no answer within 0.1 s"


def test_without_a_webhook_there_is_no_message(failed_run: str) -> None:
    assert webhook.send_notification("", failed_run, "FAILED") == ""


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
