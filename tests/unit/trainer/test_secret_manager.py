"""The run file's secrets: read when a container starts, in no spec, log or record."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.receiver import Receiver
from tests.support.pipelines.run_files import problems_of, small
from vlmpipe.job_spec.build import job_spec, jobs_of
from vlmpipe.trainer import launch, secret_manager
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.errors import EXIT_FOLDER_VARIABLE, ExitCode, UserError, run_main
from vlmpipe.trainer.launch import TorchrunEnd
from vlmpipe.trainer.redaction import HIDDEN, SECRETS_VARIABLE, hiding_secrets, redact
from vlmpipe.trainer.secret_manager import use_secrets
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record

NAME = "projects/p/secrets/tracker/versions/3"
VALUE = "correct horse"  # of no form that is known


@pytest.fixture
def secret_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr(secret_manager, "PAUSE_S", 0.0)
    for name in ("TRACKER_LOGIN", SECRETS_VARIABLE):
        monkeypatch.setenv(name, "")  # so that what is set is taken back
    with Receiver() as receiver:
        receiver.secrets = {NAME: VALUE}
        monkeypatch.setattr(secret_manager, "SECRET_MANAGER", receiver.endpoint)
        yield receiver


def launched(folder: Path, monkeypatch: pytest.MonkeyPatch, secrets: dict[str, str]) -> list[dict[str, str]]:
    """The environments that the launcher hands to the job's process."""
    run = small(secrets=secrets).to_run_json(RunPaths(run_id="r", root_uri=str(folder)))
    write_record(LocalStorage(folder / "runs/r"), "run.json", run)
    seen: list[dict[str, str]] = []

    def ended(*_: Any) -> TorchrunEnd:
        seen.append(dict(os.environ))
        return TorchrunEnd(ExitCode.OK)

    monkeypatch.setattr(launch, "_one_process", ended)
    monkeypatch.delenv("CLUSTER_SPEC", raising=False)
    monkeypatch.setenv(EXIT_FOLDER_VARIABLE, "")
    arguments = ["--nproc-per-node", "1", "--", "vlmpipe.trainer.train", "--config", str(folder / "runs/r/run.json")]
    assert launch.main(arguments) == ExitCode.OK
    return seen


def test_the_launcher_hands_secrets_to_the_jobs_processes(
    secret_store: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (environment,) = launched(tmp_path, monkeypatch, {"TRACKER_LOGIN": NAME})
    assert environment["TRACKER_LOGIN"] == VALUE and secret_store.asked == [NAME]
    assert VALUE not in "".join(capsys.readouterr())
    use_secrets({"TRACKER_LOGIN": NAME})  # in a process that the launcher started
    assert secret_store.asked == [NAME]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any(VALUE.encode() in path.read_bytes() for path in files)


def test_a_variable_of_ones_own_machine_takes_the_secrets_place(
    secret_store: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKER_LOGIN", "my own login")
    (environment,) = launched(tmp_path, monkeypatch, {"TRACKER_LOGIN": NAME})
    assert (environment["TRACKER_LOGIN"], secret_store.asked) == ("my own login", [])
    assert redact("it is my own login.") == f"it is {HIDDEN}."


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("projects/p/secrets/forbidden/versions/1", 77, "no permission to read projects/p/secrets/forbidden"),
        ("projects/p/secrets/none/versions/1", 77, "Secret Manager answers 404 for projects/p/secrets/none"),
    ],
)
def test_a_secret_that_cannot_be_read_ends_the_job_before_nodes_meet(
    secret_store: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, said: str
) -> None:
    monkeypatch.setattr(launch, "meet", lambda *_, **__: pytest.fail("the nodes met"))
    with pytest.raises(UserError, match=rf"secrets.TRACKER_LOGIN: {said}") as caught:
        launched(tmp_path, monkeypatch, {"TRACKER_LOGIN": name})
    assert caught.value.code == code


def test_a_busy_secret_manager_is_asked_again_and_one_out_of_reach_is_named(
    secret_store: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret_store.secret_codes = [503, 429]
    use_secrets({"TRACKER_LOGIN": NAME})
    assert os.environ["TRACKER_LOGIN"] == VALUE and len(secret_store.asked) == 3
    monkeypatch.setenv("TRACKER_LOGIN", "")
    monkeypatch.setattr(secret_manager, "SECRET_MANAGER", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"secrets.TRACKER_LOGIN: Secret Manager gives no answer") as caught:
        use_secrets({"TRACKER_LOGIN": NAME})
    assert caught.value.code == ExitCode.UNAVAILABLE


def test_what_a_process_prints_of_its_secrets_is_hidden(
    secret_store: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    secret_store.secrets[NAME] = f"{VALUE}\nsecond line"
    use_secrets({"TRACKER_LOGIN": NAME})

    def main() -> None:
        print(f"logged in with {VALUE} and second line")
        raise RuntimeError(VALUE)

    assert run_main(main) == ExitCode.UNEXPECTED
    printed = capsys.readouterr()
    assert VALUE not in printed.out + printed.err and f"logged in with {HIDDEN} and {HIDDEN}" in printed.out


@pytest.mark.parametrize("cut", range(len(VALUE)))
def test_a_secret_is_hidden_wherever_a_write_splits_it(
    secret_store: Receiver, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    use_secrets({"TRACKER_LOGIN": NAME})
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    with hiding_secrets():
        print("with", VALUE[:cut], end="", flush=True)
        assert VALUE[:2] not in stream.getvalue()
        print(VALUE[cut:], "done")
    assert VALUE not in stream.getvalue() and "done" in stream.getvalue()


def test_specs_and_records_hold_no_more_than_the_name() -> None:
    config = small(secrets={"TRACKER_LOGIN": NAME})
    run_json = config.to_run_json(RunPaths(run_id="r", root_uri="runs"))
    assert JobConfig.model_validate(run_json).secrets == {"TRACKER_LOGIN": NAME}
    specs = json.dumps([job_spec(config, job, "gs://b/r") for job in jobs_of(config)])
    assert NAME not in specs and "TRACKER_LOGIN" not in specs


@pytest.mark.parametrize(
    ("secrets", "said"),
    [
        ({"TRACKER_LOGIN": "hunter2hunter2"}, "expected projects/PROJECT/secrets/NAME/versions/VERSION"),
        ({"TRACKER_LOGIN": "projects/p/secrets/tracker"}, "expected projects/PROJECT/secrets/NAME/versions/VERSION"),
        ({"tracker-login": NAME}, "not a name of an environment variable"),
        ({"PYTHONPATH": NAME}, "a variable of the platform or of Python"),
    ],
)
def test_secrets_are_named_variables_with_versions(secrets: dict[str, str], said: str) -> None:
    (problem,) = problems_of(secrets=secrets).values()
    assert said in problem and "hunter2" not in problem


def test_a_variable_is_a_secret_or_not() -> None:
    found = problems_of(secrets={"TRACKER": NAME}, cluster__env={"TRACKER": "a"})
    assert found == {"secrets.TRACKER": "found in cluster.env too, which is set first; expected one of both"}
