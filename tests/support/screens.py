"""Snapshots of the screens of commands: the same on every machine, in a pipe.

    make golden

writes them, and a test compares each with what is printed now.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner

from tests.support.compared_runs import compared, make
from tests.support.paths import ROOT
from tests.support.planner.plans import amber, make_plan, red
from tests.support.runs_root import FAILED, STOPPED, register, write_run
from vlmpipe.cli.app import app
from vlmpipe.cli.views.comparison import print_comparison
from vlmpipe.cli.views.doctor import print_rows
from vlmpipe.cli.views.plan import print_plan_tables
from vlmpipe.cli.views.tables import print_findings, print_violations
from vlmpipe.doctor.rows import Row
from vlmpipe.job_spec.violation import Violation
from vlmpipe.pipelines.checks.finding import Finding
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record

FOLDER = ROOT / "tests/fixtures/screens"
STARTED_S = 1_763_667_000.0
PIPELINE = {
    "machines": 2, "hours": 0.9, "usd": 1.2, "errors": [], "assumptions": [],
    "steps": [
        {
            "name": name, "is_job": is_job, "tasks": 1, "machine": machine, "disk_needed_bytes": 58e9,
            "disk_free_bytes": 87e9, "memory_needed_bytes": 13e9, "memory_bytes": 41e9, "start_s": 108.0,
            "work_s": 1716.0, "watches_s": 0.0 if name == "prepare-data" else 3600.0, "usd": usd,
        }
        for name, is_job, machine, usd in (
            ("prepare-data", False, "e2-standard-16", 0.33), ("train", False, "e2-standard-4", 0.02),
            ("train", True, "a3-megagpu-8g", 0.85),
        )
    ],
}  # fmt: skip
FIRST, SECOND = "llava-local-20261128-221147", "llava-local-20261129-080910"


def plan() -> None:
    """A green plan."""
    print_plan_tables(make_plan())


def plan_verbose() -> None:
    """An amber plan with what its figures assume."""
    print_plan_tables(amber(), verbose=True)


def plan_stages() -> None:
    """Two stages, of which the second does not fit and shares much with the first; with steps of the pipeline."""
    starts = {"align": "lmsys/vicuna-7b-v1.5", "finetune": "export of align"}
    named: dict[str, dict[str, Any]] = {
        name: {**stage, "name": f"llava-{name}", "starts_from": start, "data": f"gs://bucket/llava/{name}.json"}
        for (name, start), stage in zip(starts.items(), (make_plan(), red()), strict=True)
    }
    for stage in named.values():
        stage["pipeline"] = PIPELINE
    whole = {
        "name": "llava", "state": "red", "errors": ["does not fit"], "doubts": [], "train_hours": 20.0,
        "train_hours_range": (18.0, 24.0), "usd": 1620.0, "usd_range": (1458.0, 1944.0),
        "schedule_runs_per_month": None, "schedule_usd_per_month": None, "stages": named,
    }  # fmt: skip
    print_plan_tables(whole)


def check() -> None:
    """Checks of a run file, one of which fails."""
    hub = "Qwen/Qwen2.5-VL-3B-Instruct will be fetched from the Hugging Face hub by the job"
    batch = "64 packed sequences a step: nodes 4 x processes 8 x train.micro_batch_size 2 x passes 1"
    missing = "data.source 'data/llava.json' does not exist\n  expected: an existing file\n  to do:    mend the path"
    print_findings(
        [
            Finding("run file", "ok", "qwen: all fields are known and in range"),
            Finding("model", "unchecked", hub),
            Finding("tokenizer", "unchecked", hub),
            Finding("batch", "ok", batch),
            Finding("network", "warning", "NCCL_NET is set, and machines of one node have no network between them"),
            Finding("data", "failed", missing, 64),
        ]
    )


def check_job_spec() -> None:
    """Violations of a job spec."""
    job = "job_spec.service_account"
    machine = "job_spec.worker_pool_specs[0].machine_spec.machine_type"
    print_violations(
        [
            Violation("VP505", (), "none", "an account of its own", path=job),
            Violation("VP301", (), "a3-megagpu-9g", "a3-megagpu-8g", "write a3-megagpu-8g", path=machine),
        ],
        "",
    )


def status() -> None:
    """A run that ended well."""
    root = Path()
    folder = write_run(root, "digits-1", started_s=STARTED_S, exact_match=0.94)
    _step(folder, "prepare-data", 0, 2)
    _step(folder, "train", 2, 62)
    _vlmpipe("status", "digits-1", "--root", ".")


def diagnose() -> None:
    """A run whose training ran out of memory."""
    folder = write_run(Path(), "digits-1", started_s=STARTED_S, exit_code=FAILED)
    _step(folder, "train", 1, 9, state="failed")
    example = (ROOT / "tests/fixtures/failures/gpu-out-of-memory.log").read_text(encoding="utf-8")
    LocalStorage(folder).write("logs/train/workerpool0-0.log", example.encode())
    LocalStorage(folder).write("pipeline.log", b"")
    _vlmpipe("diagnose", "digits-1", "--root", ".")


def runs() -> None:
    """Runs of every outcome, one of them with tags and one in the registry."""
    root = Path()
    write_run(root, "digits-20260101-000000", started_s=STARTED_S, prepared="a", exact_match=0.94)
    write_run(root, FIRST, name="llava-local", started_s=STARTED_S + 3600, exit_code=STOPPED)
    write_run(root, SECOND, name="llava-local", started_s=STARTED_S + 7200, exit_code=FAILED)
    write_run(root, "digits-20260103-000000", started_s=STARTED_S + 9000, prepared="b", exact_match=0.25)
    register(root, "digits-20260101-000000")
    _vlmpipe("runs", "tag", SECOND, "baseline", "--root", ".")
    with mock.patch("vlmpipe.cli.views.inventory.shown_size", return_value="12 kB"):
        _vlmpipe("runs", "list", "--root", ".")


def compare() -> None:
    """Two runs, of which the second answers better."""
    answers = [(f"s{number}", ("red", "two")[number % 2], "red") for number in range(24)]
    slices = {"colour": {"questions": 12, "chance": 0.5}, "count": {"questions": 12, "chance": 0.25}}
    evaluation: dict[str, Any] = {"questions": 24, "chance": 0.375, "slices": slices}
    make(Path(), FIRST, answers, evaluate=evaluation)
    make(Path(), SECOND, [(sample, right, right) for sample, right, _ in answers], evaluate=evaluation)
    print_comparison(compared(Path(), FIRST, SECOND))


def gate() -> None:
    """What the gate of the first run file can see with 300 questions."""
    _vlmpipe("gate", str(ROOT / "configs/digits.yaml"), "--questions", "300")


def doctor() -> None:
    """A missing grant, a quota that cannot be seen and an API that is on."""
    account = "trainer@my-project.iam.gserviceaccount.com"
    grant = f"gcloud storage buckets add-iam-policy-binding gs://my-bucket --member=serviceAccount:{account}"
    print_rows(
        [
            Row("API aiplatform", "ok", "enabled in my-project"),
            Row("bucket", "missing", f"{account} may not write gs://my-bucket", f"{grant} --role=roles/storage.admin"),
            Row("quota", "cannot see", "no permission to list quotas", "gcloud auth application-default login"),
        ]
    )


SCREENS: dict[str, Callable[[], None]] = {
    screen.__name__: screen
    for screen in (
        plan,
        plan_verbose,
        plan_stages,
        check,
        check_job_spec,
        status,
        diagnose,
        runs,
        compare,
        gate,
        doctor,
    )
}  # fmt: skip


def screen_of(name: str) -> str:
    """What the screen prints in an empty folder, at Greenwich, without spaces at the ends of lines."""
    with _empty_folder(), contextlib.redirect_stdout(io.StringIO()) as stream:
        SCREENS[name]()
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.txt"


@contextlib.contextmanager
def _empty_folder() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), mock.patch.dict(os.environ, TZ="UTC"):
        time.tzset()
        yield
    time.tzset()


def _step(folder: Path, name: str, begin_s: int, end_s: int, state: str = "done") -> None:
    times = {"started_s": STARTED_S + begin_s, "ended_s": STARTED_S + end_s, "updated_s": STARTED_S + end_s}
    write_record(LocalStorage(folder), f"steps/{name}.json", {"step": name, "state": state, **times})


def _vlmpipe(*arguments: str) -> None:
    print(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout, end="")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for screen_name in SCREENS:
        file_of(screen_name).write_text(screen_of(screen_name), encoding="utf-8")
