"""Cancelling runs of this machine, and following their logs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.platforms.local import control as local_control
from vlmpipe.runs.folders.choice import open_run
from vlmpipe.runs.folders.summary import report_of
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError

ARGUMENTS = ["configs/digits.yaml", "train.epochs=2"]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_run_file(ROOT / "configs" / "digits.yaml", [f"output.root_uri={tmp_path}"])


def test_only_the_process_that_holds_the_run_gets_the_signal(config: RunConfig) -> None:
    run = open_run(config, ARGUMENTS)
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (run.folder / "run.lock").write_text(f"{bystander.pid} 0.0")  # as when the pid was given to another process
    assert not local_control.cancel(report_of(run.folder))
    bystander.communicate(b"\n")
    assert bystander.returncode == 0
    run.close(1)
    with pytest.raises(ConfigError, match="nothing to cancel"):
        local_control.cancel(report_of(run.folder))


def test_logs_are_followed_until_the_run_is_over(config: RunConfig) -> None:
    run = open_run(config, ARGUMENTS)
    folder = run.folder / "logs" / "train"
    folder.mkdir(parents=True)
    files = [folder / f"workerpool{number}-0.log" for number in range(2)]
    for file in files:
        file.write_text("old\nstarting\n")

    def go_on(_seconds: float) -> None:
        with files[1].open("a") as log:
            log.write("step 1\nlast words\n")
        run.close(0)

    found = list(
        local_control.follow_logs(run.folder, local_control.log_files(run.folder, "train"), last=1, sleep=go_on)
    )
    assert {line.step for line in found} == {"train"}
    assert [(line.process, line.text) for line in found] == [
        ("workerpool0-0", "starting"), ("workerpool1-0", "starting"), ("workerpool1-0", "step 1"),
        ("workerpool1-0", "last words"),
    ]  # fmt: skip
    with pytest.raises(UserError, match="no log of step evaluate") as caught:
        local_control.log_files(run.folder, "evaluate")
    assert (caught.value.code, "one of train" in caught.value.expected) == (ExitCode.NOT_FOUND, True)


def test_lines_of_the_pipelines_log_have_the_time_and_step_that_it_names(tmp_path: Path) -> None:
    log = local_control.LogFile(tmp_path / "pipeline.log")
    lines = [
        "before any stamp",
        "vlmpipe: this attempt started at 2026-11-24 23:59:58",
        "23:59:59.500 - INFO - Executing task \x1b[96m'prepare-data'\x1b[0m",
        "    read 20 records",
        "00:00:01.000 - INFO - Executing task 'train'",
        "    [KFP Executor 2026-11-25 00:00:02,250 INFO]: Got executor_input:",
        "99:99:99.000 is no time",
    ]
    parsed = [log.parse(line) for line in lines]
    assert [line.text for line in parsed] == lines
    assert [line.time[:23] for line in parsed] == [
        "", "2026-11-24T23:59:58.000", "2026-11-24T23:59:59.500", "2026-11-24T23:59:59.500",
        "2026-11-25T00:00:01.000", "2026-11-25T00:00:02.250", "2026-11-25T00:00:02.250",
    ]  # fmt: skip
    assert [line.step for line in parsed] == ["", "", "prepare-data", "prepare-data", "train", "train", "train"]
