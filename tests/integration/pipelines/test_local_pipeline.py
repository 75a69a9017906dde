"""The real graph under the real kfp.local, with stand-ins for the steps that need data or a model."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kfp import local
from kfp.local import subprocess_task_handler
from kfp.local.logging_utils import indented_print

from tests.fakes.receiver import Receiver
from tests.fakes.steps import replace_steps
from tests.support.data.prepared import conversation, job_config, png, run_prepare, write_json
from tests.support.fork_server import python_with
from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.config.run_settings import run_sha256
from vlmpipe.pipelines.local_runner import print_put_back, run_local
from vlmpipe.platforms.local.jobs.subreaper import run_in_subreaper
from vlmpipe.trainer.audit.audit import AuditRequest, audit
from vlmpipe.trainer.audit.catalogue import Catalogue
from vlmpipe.trainer.audit.findings import Audit
from vlmpipe.trainer.config.job import AuditConfig
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record

pytestmark = pytest.mark.timeout(120)

BEFORE = ["prepare-data"]
ENCODING = ["cache-features", "collect-cache-features"]
TRAINING = ["train", "sync-checkpoint", "evaluate", "decide"]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_run_file(ROOT / "configs/digits.yaml", [f"output.root_uri={tmp_path / 'out'}"])


@pytest.fixture(scope="module")
def step_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Python that has what kfp.local's steps import, for tests of the graph. Tests of the program start real ones."""
    modules = ("kfp.dsl.executor_main", "vlmpipe.components.runtime.resolve",
               "vlmpipe.components.runtime.prepared_data", "vlmpipe.components.runtime.run_results",
               "vlmpipe.job_spec.parse", "vlmpipe.report.build", "vlmpipe.trainer.storage.export_manifest")  # fmt: skip
    with python_with(tmp_path_factory.mktemp("steps") / "server", *modules) as command:
        yield shlex.join(command)


@pytest.fixture
def trace(tmp_path: Path, step_python: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the stand-ins note that they ran. What `run_local` sets for its own process is put back."""
    replace_steps(monkeypatch)
    fork_steps(monkeypatch, step_python)
    monkeypatch.setenv("TEST_TRACE", str(tmp_path / "trace"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path / "trace"
    signal.signal(signal.SIGTERM, before)
    local.config.LocalExecutionConfig.instance = None


def fork_steps(monkeypatch: pytest.MonkeyPatch, step_python: str) -> None:
    """Let kfp.local start steps by this Python."""
    monkeypatch.setattr(subprocess_task_handler, "environment", lambda **_: contextlib.nullcontext(step_python))


def run(config: RunConfig, monkeypatch: pytest.MonkeyPatch, **answers: str) -> int:
    for name, value in answers.items():
        monkeypatch.setenv(f"TEST_{name.upper()}", value)
    return run_local(config, run_id="r1")


def step_record(config: RunConfig, step: str) -> dict[str, Any]:
    path = Path(config.output.root_uri, "runs/r1/steps", f"{step}.json")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


@pytest.fixture
def receiver(config: RunConfig, trace: Path, step_python: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Is told by the real notify in the place of its stand-in: how a run ends for other people."""
    monkeypatch.undo()
    replace_steps(monkeypatch, kept="notify")
    fork_steps(monkeypatch, step_python)
    monkeypatch.setenv("TEST_TRACE", str(trace))
    monkeypatch.setenv("TMPDIR", str(trace.parent))
    with Receiver() as receiver:
        yield receiver


def notifying(config: RunConfig, receiver: Receiver) -> RunConfig:
    told = [f"notify.webhook={receiver.endpoint}", "notify.email=[a@b.org]"]
    return load_run_file(ROOT / "configs/digits.yaml", [f"output.root_uri={config.output.root_uri}", *told])


def told_of(receiver: Receiver) -> list[tuple[str, str | None, str]]:
    return [(one["outcome"], one.get("step"), one["run_id"]) for one in receiver.messages]


def audit_of_two(root: Path) -> tuple[Audit, Catalogue]:
    """What is found in four samples, two of which answer one question about one image differently."""
    (root / "images").mkdir(parents=True)
    rows = []
    for number, image in enumerate((1, 1, 2, 3)):
        (root / f"images/{image}.png").write_bytes(png(image))
        split = "eval" if image == 3 else "train"
        talk = conversation("<image>\nWhat is it?", f"Image {number}.")
        rows.append({"id": f"s{number}", "image": f"{image}.png", "conversations": talk, "split": split})
    source = write_json(root / "records.json", rows)
    job = job_config(root, source=str(source), image_folder=str(root / "images"), max_split_error=1.0)
    return audit(AuditRequest(job, run_prepare(job).uri, has_run=False))


def audited(config: RunConfig) -> RunConfig:
    """The same with an audit, and in its run's folder what the job of the audit leaves."""
    folder = Path(config.output.root_uri, "runs/r1/audit")
    audit_of_two(folder.parents[2])[0].write(LocalStorage(folder))
    return config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"audit": AuditConfig()})})


def without_audit(config: RunConfig, ran: list[str]) -> list[str]:
    """What ran but for the audit, a branch of its own, whose page the real step has made."""
    folder = Path(config.output.root_uri, "runs/r1/audit")
    assert step_record(config, "audit")["state"] == "done"
    page = (folder / "audit.html").read_bytes()
    assert b"exclude 2 of 4 samples" in page and b"data:image/png;base64" in page
    [artifact] = [
        path for path in (folder.parent / "kfp").rglob("page") if path.parent.name.startswith("collect-audit")
    ]
    assert artifact.read_bytes() == page
    ran.remove("audit")
    return ran


@pytest.mark.slow  # with steps that are no stand-ins: tests/e2e/test_quickstart.py; audit and order: the next test
def test_missing_features_are_encoded_before_training_and_an_accepted_model_is_registered(
    config: RunConfig, trace: Path, monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    told = audited(notifying(config, receiver))
    assert run(told, monkeypatch, features="encode", decision="accepted") == 0
    ran = trace.read_text(encoding="utf-8").splitlines()
    assert without_audit(config, ran) == [*BEFORE, *ENCODING, *TRAINING, "register-model"]
    written = json.loads(Path(config.output.root_uri, "runs/r1/run.json").read_text(encoding="utf-8"))
    submission = written["run"].pop("submission")
    assert submission.startswith("digits-") and written["run"] == {"run_id": "r1", "root_uri": config.output.root_uri}
    assert told_of(receiver) == [("done", None, "r1")]
    assert "webhook notified (200)" in step_record(config, "notify")["message"]
    assert Path(config.output.root_uri, "runs/r1/report.html").exists()


@pytest.mark.parametrize("tasks", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_data_tasks_come_between_their_plan_and_what_puts_them_together(
    tasks: int, config: RunConfig, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also: features that are there start no job, a rejected model is not registered, and an audit has its page."""
    shared = config.model_copy(update={"data": config.data.model_copy(update={"tasks": 3})})
    assert run(audited(shared), monkeypatch, features="reuse", decision="rejected", tasks=str(tasks)) == 0
    plan, *ran = trace.read_text(encoding="utf-8").splitlines()
    lines = without_audit(config, ran)
    assert plan == "plan-data"
    assert sorted(lines[:tasks]) == [f"prepare-chunks {task} of 3 for r1" for task in range(tasks)]
    assert lines[tasks:] == [*BEFORE, *TRAINING, "notify r1 SUCCEEDED"]
    assert step_record(config, "cache-features")["state"] == "reused"


def test_what_loops_in_kfp_do_to_print_ends_with_the_run() -> None:
    plain_print, first, second = print, indented_print(), indented_print()
    with print_put_back():
        for start in (first, second):
            start.__enter__()
        for end in (first, second):  # two threads end in the order in which they began
            end.__exit__(None, None, None)
        assert builtins.print is not plain_print
    assert builtins.print is plain_print


@pytest.fixture
def staged(tmp_path: Path) -> RunConfig:
    return load_run_file(ROOT / "configs/digits-stages.yaml", [f"output.root_uri={tmp_path / 'out'}"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "changes", [pytest.param([], id="same"), pytest.param(["train.seed=1"], marks=pytest.mark.slow)]
)
def test_a_stage_begins_when_the_one_before_was_accepted_and_an_accepted_one_is_not_run_again(
    changes: list[str], staged: RunConfig, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    align, stage = Path(staged.output.root_uri, "runs/r1/stages/align"), [*BEFORE, *TRAINING]
    assert run(staged, monkeypatch, features="off", decision="rejected") == 0
    assert trace.read_text(encoding="utf-8").splitlines() == [*stage, "notify r1 SUCCEEDED"]
    assert (align / "steps/train.json").exists() and not (align.parents[1] / "steps/train.json").exists()

    decision = {"accepted": True, "reason": "good", "checks": [], "run_sha256": run_sha256(LocalStorage(align))}
    write_record(LocalStorage(align), "decision.json", decision)  # the stand-in leaves none
    trace.unlink()
    again = load_run_file(ROOT / "configs/digits-stages.yaml", [f"output.root_uri={staged.output.root_uri}", *changes])
    assert run(again, monkeypatch, features="off", decision="accepted") == 0
    first = stage if changes else ["decide"]
    assert trace.read_text(encoding="utf-8").splitlines() == [*first, *stage, "register-model", "notify r1 SUCCEEDED"]
    assert (align.parents[1] / "steps/train.json").exists()


@pytest.mark.slow
def test_a_failing_stage_ends_the_run_with_its_exit_code(
    staged: RunConfig, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(staged, monkeypatch, features="off", decision="accepted", fail="train") == ExitCode.DATA
    assert trace.read_text(encoding="utf-8").splitlines() == [*BEFORE, "train", "notify r1 FAILED"]


def test_a_failing_job_ends_the_run_with_its_exit_code_and_notify_still_runs(
    config: RunConfig, trace: Path, monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    told = notifying(config, receiver)
    assert run(told, monkeypatch, features="off", decision="accepted", fail="train") == ExitCode.DATA
    assert trace.read_text(encoding="utf-8").splitlines() == [*BEFORE, "train"]
    record = step_record(config, "train")
    assert record["message"] == "the picture is upside down" and record["detail"]["exit_code"] == 65
    assert "kfp" in os.listdir(Path(config.output.root_uri, "runs/r1")), "kfp's own files lie in the run's folder"
    assert told_of(receiver) == [("failed", "train", "r1")]
    assert "webhook notified (200)" in step_record(config, "notify")["message"]
    assert Path(config.output.root_uri, "runs/r1/report.html").exists()


@pytest.mark.slow
def test_a_receiver_that_is_down_never_changes_the_result(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    receiver.codes = [410]
    assert run(notifying(config, receiver), monkeypatch, features="off", decision="accepted") == 0
    assert "webhook NOT notified: it answers 410" in step_record(config, "notify")["message"]
    assert Path(config.output.root_uri, "runs/r1/report.html").exists()


def test_a_step_that_is_killed_fails_the_run_and_is_recorded_as_failed(
    config: RunConfig, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(config, monkeypatch, features="off", decision="killed") == ExitCode.UNEXPECTED
    assert trace.read_text(encoding="utf-8").splitlines() == [*BEFORE, *TRAINING, "notify r1 FAILED"]
    assert step_record(config, "decide")["state"] == "failed" and "killed" in step_record(config, "decide")["message"]


PARENT = """
import subprocess, sys
from vlmpipe.platforms.local.jobs.subreaper import run_in_subreaper
sys.exit(subprocess.call(run_in_subreaper(sys.argv[1:])))
"""
PROGRAM = """
import sys
import pytest
from vlmpipe.pipelines import training
from vlmpipe.pipelines import local_runner
from tests.fakes import steps
steps.replace_steps(pytest.MonkeyPatch())
training.prepare_data = steps.hold_data
sys.exit(local_runner.main())
"""


@pytest.fixture
def alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Read end of a FIFO that the held step keeps open: it ends when the step is gone."""
    os.mkfifo(tmp_path / "alive")
    monkeypatch.setenv("TEST_ALIVE", str(tmp_path / "alive"))
    reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    yield reader
    os.close(reader)


def prepare(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of the program that `vlmpipe run` starts; data preparation will hold."""
    monkeypatch.setenv("TEST_TRACE", str(tmp_path / "trace"))
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    (tmp_path / "run_file.json").write_text(json.dumps(config.to_dict()))
    (tmp_path / "program.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{PROGRAM}")
    arguments = ["--config", str(tmp_path / "run_file.json"), "--run-id", "r1"]
    return [sys.executable, str(tmp_path / "program.py"), *arguments]


def start(command: list[str]) -> subprocess.Popen[str]:
    """Start it, up to the moment when data preparation holds."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    for line in process.stdout:
        if line.strip() == "ready":
            return process
    raise AssertionError("data preparation did not start")


def test_a_request_to_stop_ends_the_step_runs_notify_and_leaves_nothing(
    config: RunConfig, tmp_path: Path, alive: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = start(run_in_subreaper(prepare(config, tmp_path, monkeypatch)))
    program.terminate()
    output, _ = program.communicate()
    assert program.returncode == ExitCode.PREEMPTED, output
    assert os.read(alive, 1) == b""
    assert "error: prepare-data was stopped on request" in output and "Traceback" not in output
    assert (tmp_path / "trace").read_text().splitlines() == ["notify r1 FAILED"]
    assert step_record(config, "prepare-data")["state"] == "stopped"


def test_nothing_is_left_when_whoever_started_the_program_is_killed(
    config: RunConfig, tmp_path: Path, alive: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = start([sys.executable, "-c", PARENT, *prepare(config, tmp_path, monkeypatch)])
    parent.kill()
    parent.wait()
    assert os.read(alive, 1) == b""
