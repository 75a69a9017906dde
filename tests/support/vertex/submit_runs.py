"""Google's real client against our fake Vertex API: what the fixtures of `vlmpipe submit` and `schedule` need."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.vertex.server import FakeVertex
from tests.support.command_line import Answer
from tests.support.paths import ROOT
from vlmpipe.cli import app as cli
from vlmpipe.cli import output
from vlmpipe.google_cloud import client as vertex_api
from vlmpipe.google_cloud import retries
from vlmpipe.pipelines import schedule as schedule_plan
from vlmpipe.planner.spending.approval import Approved, Spending
from vlmpipe.platforms.vertex import submit

CONFIG = str(ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml")
MINE = "gcp.project=test-project"
CHEAP = Spending("llava-7b-zero2-spot", "green", (), 20.0, 2.0, "1 x a2-highgpu-1g", "spot")
DEAR = replace(CHEAP, usd=412.0)
APPROVED = Approved(CHEAP)
RED = replace(CHEAP, state="red", errors=("VP101 machine_type: no such machine",))


Submit = Callable[..., Answer]


@contextlib.contextmanager
def running_vertex(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    """The server, where `vlmpipe` finds it with the run file's bucket, and a client that does not wait long for it."""
    with FakeVertex() as running, FakeGcs(buckets=["example-bucket"]) as buckets:
        if "STORAGE_EMULATOR_HOST" not in os.environ:  # a test may have put its run into a bucket of its own
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", buckets.endpoint)
        monkeypatch.setenv(vertex_api.ENDPOINT_VARIABLE, running.endpoint)
        monkeypatch.setattr(retries, "RETRY", retries.RETRY.with_delay(0.01, 0.3).with_timeout(1.2))
        yield running


def submitter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *command: str
) -> Submit:
    """`vlmpipe submit`, or the command given, in an empty folder, without a terminal, with this plan; None for the
    planner's own."""
    return _command(list(command) or ["submit", "--detach"], submit, tmp_path, monkeypatch, capfd)


def commander(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Submit:
    """Any command of `vlmpipe` in that folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(cli.DEBUG_VARIABLE, "")
    monkeypatch.setattr(output, "SILENT_S", 3600.0)  # what a slow machine is told is no part of what is tested here
    return lambda *arguments: _called(monkeypatch, capfd, arguments)


def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Submit:
    """`vlmpipe schedule`, likewise; the first argument is what to do."""

    def scheduling(verb: str, *arguments: str, **options: Any) -> Answer:
        return _command(["schedule", verb], schedule_plan, tmp_path, monkeypatch, capfd)(*arguments, **options)

    return scheduling


def _command(
    command: list[str],
    planning: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Submit:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(cli.DEBUG_VARIABLE, "")
    monkeypatch.setattr(output, "SILENT_S", 3600.0)  # what a slow machine is told is no part of what is tested here

    def running(*arguments: str, plan: Spending | None = CHEAP, project: str = MINE) -> Answer:
        with monkeypatch.context() as planner:
            if plan:
                planner.setattr(planning, "plan_config", lambda config: None)
                planner.setattr(planning, "spending_of", lambda config, answer: plan)
            return run(project, *arguments)

    def run(*arguments: str) -> Answer:
        return _called(monkeypatch, capfd, [*command, CONFIG, *arguments])

    return running


def _called(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: Sequence[str]) -> Answer:
    monkeypatch.setattr(sys, "argv", ["vlmpipe", *arguments])
    monkeypatch.setattr(output, "SILENT_S", 3600.0)  # no notice of a long command on a slow machine
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return Answer(int(caught.value.code or 0), *capfd.readouterr())
