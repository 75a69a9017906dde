"""A fourth platform is a folder and a line of the table: the commands then know it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.command_line import Answer
from tests.support.paths import ROOT
from vlmpipe.cli import app as cli
from vlmpipe.platforms.find import find
from vlmpipe.platforms.table import PLATFORMS, Line, platform_of
from vlmpipe.runs import submitted
from vlmpipe.trainer.errors import ConfigError

TOY = """
import json
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.platforms.base import LogLine, Platform
from vlmpipe.platforms.graph import Graph, component_of
from vlmpipe.platforms.job_step import run_custom_job
from vlmpipe.runs.run_state import RunState
from vlmpipe.runs.steps import Step


class ToyGraph(Graph):
    target = "toy"

    def job_step(self, config, job):
        return component_of(run_custom_job, config.gcp.pipeline_image)


@dataclass(frozen=True)
class ToyStatus:
    name: str
    word: str
    is_over = True
    exit_code = 0

    @property
    def state(self):
        return RunState(self.name, (Step("train", self.word),))

    def lines(self):
        return [f"toy run {self.name}: {self.word}"]

    def as_json(self):
        return {"run": self.name, "outcome": self.word}


@dataclass(frozen=True)
class ToyRun:
    file: Path
    asks = asks_for_logs = "the toy service"

    @property
    def argument(self):
        return self.file.stem

    def reader(self):
        return lambda: ToyStatus(self.argument, json.loads(self.file.read_text())["state"])

    def logs(self, *, step, last, follow):
        yield LogLine("train: step 1", "", "train", "rank-0", "step 1")

    def cancel(self):
        self.file.write_text(json.dumps({"state": "stopped"}))
        return True

    def diagnose(self):
        raise NotImplementedError


@dataclass(frozen=True)
class ToySubmitted:
    started: ToyRun | None
    pipeline: Path

    def lines(self):
        return [f"sent {self.pipeline.name}"]

    def as_json(self):
        return {"sent": self.started is not None, "pipeline": str(self.pipeline)}


class Toy(Platform):
    name, title = "toy", "the toy service"
    folder = Path(__file__).parent

    def check(self, config):
        pass

    def check_files(self, config):
        pass

    def root_uri(self, config):
        return config.bucket_root_uri

    def graph(self):
        return ToyGraph()

    def run_job(self, config, name, spec, labels):
        return json.dumps({"toy": name})

    def find(self, name, *, root, project, location):
        file = self.folder / f"{name}.json"
        return ToyRun(file) if file.is_file() else None

    def submit(self, order):
        compiled = order.compile(order.config, self.folder / "pipeline.yaml")
        if order.dry_run:
            return ToySubmitted(None, compiled.path)
        run = ToyRun(self.folder / f"{order.config.name}-1.json")
        run.file.write_text(json.dumps({"state": "running"}))
        return ToySubmitted(run, compiled.path)
"""
CONFIG = str(ROOT / "configs/digits.yaml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy's folder, with its line in the table."""
    package = tmp_path / "toy_platform"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "platform.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PLATFORMS, "toy", Line("toy_platform.platform:Toy"))
    monkeypatch.setattr(submitted, "SUBMITTED", tmp_path / "submitted")
    monkeypatch.chdir(tmp_path)
    return package


def vlmpipe(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str) -> Answer:
    monkeypatch.setattr(sys, "argv", ["vlmpipe", *arguments])
    monkeypatch.setenv(cli.DEBUG_VARIABLE, "")
    with pytest.raises(SystemExit) as caught:
        cli.main()
    code = caught.value.code
    return Answer(code if isinstance(code, int) else 0 if code is None else 1, *capfd.readouterr())


def test_a_folder_and_a_line_make_a_platform_that_the_commands_know(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def call(*arguments: str) -> Answer:
        return vlmpipe(monkeypatch, capfd, *arguments)

    sent = call("submit", CONFIG, "name=toys", "--target", "toy", "--detach", "--json")
    assert sent.code == 0 and sent.json == {"sent": True, "pipeline": str(folder / "pipeline.yaml")}, sent
    pipeline = (folder / "pipeline.yaml").read_text()
    assert (
        "def run_custom_job(" in pipeline and "constant: toy" in pipeline and "gcp_launcher" not in pipeline
    )  # by the toy's graph, not by another's
    assert call("status", "toys-1", "--json").json == {"run": "toys-1", "outcome": "running"}
    assert "toy run toys-1: running" in call("status", "toys-1").out
    assert "toy run toys-1: running" in call("status", "toys-1", "--watch", "--plain").out
    assert call("logs", "toys-1").out == "train: step 1\n"
    line = {"time": None, "step": "train", "process": "rank-0", "text": "step 1"}
    assert json.loads(call("logs", "toys-1", "--json").out) == line
    assert call("cancel", "toys-1", "--json").json == {"run_id": "toys-1", "asked": True}
    assert call("status", "toys-1", "--json").json["outcome"] == "stopped"
    refused = call("schedule", "list", CONFIG, "--target", "toy")
    assert refused.code == 64 and "the toy service has no schedules" in refused.err
    alone = call("submit", CONFIG, "--target", "toy", "--only", "train")
    assert alone.code == 64 and "--only is given with --target toy" in alone.err


def test_a_job_of_a_run_is_run_there(folder: Path) -> None:
    from vlmpipe.components.runtime.jobs_on_targets import run_on_target
    from vlmpipe.config.run_config import load_run_file

    config = load_run_file(CONFIG)
    assert run_on_target(config, {"scheduling": {}}, "train", "toy") == '{"toy": "digits-train"}'


def test_a_name_that_is_not_in_the_table_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError) as caught:
        platform_of("slurm")
    assert caught.value.expected == "one of vertex, kubeflow, local"


def test_without_its_line_nothing_knows_the_platform(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "toys-1.json").write_text('{"state": "running"}')
    assert find("toys-1", root="runs", project="", location="").asks == "the toy service"
    monkeypatch.delitem(PLATFORMS, "toy")
    with pytest.raises(Exception, match="no run 'toys-1'"):
        find("toys-1", root="runs", project="", location="")
