"""The command line, called in the process of the test."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.command_line import Answer, Vlmpipe
from tests.support.paths import ROOT
from vlmpipe.cli import app as cli
from vlmpipe.cli import output
from vlmpipe.platforms.local import process as local_process
from vlmpipe.runs import submitted
from vlmpipe.runs.folders.run import LocalRun


@pytest.fixture
def vlmpipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Vlmpipe:
    """The console script, called in this process from the repository's root."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(submitted, "SUBMITTED", tmp_path / "submitted")  # not what was submitted from here
    monkeypatch.setattr(output, "SILENT_S", 3600.0)  # no notice of a long command on a slow machine
    monkeypatch.setenv(cli.DEBUG_VARIABLE, "")  # --debug sets it: this puts it back afterwards

    def call(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["vlmpipe", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        code = caught.value.code
        return Answer(code if isinstance(code, int) else 0 if code is None else 1, *capfd.readouterr())

    return call


@pytest.fixture
def fake_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline that only writes results: what is tested here is what is said of them."""
    results = {
        "evaluate.json": {
            "questions": 88, "exact_match": 0.94, "cider_d": 0.8, "chance": 0.21,
            "controls": {"no_image": {"exact_match": 0.2}},
            "slices": {"digit": {"exact_match": 0.9, "chance": 0.1}, "sum": {"exact_match": 0.8, "chance": None}},
        },
        "decision.json": {"accepted": True, "reason": "Accepted: above chance"},
        "registered.json": {"model": "digits", "version": 3, "uri": "x", "alias": "champion"},
        "report.html": {},
    }  # fmt: skip
    program = "import sys, pathlib, json\nfor name, value in json.loads(sys.argv[2]).items():\n"
    program += "    pathlib.Path(sys.argv[1], name).write_text(json.dumps(value))"

    def command(run: LocalRun, **_options: object) -> list[str]:
        return [sys.executable, "-c", program, str(run.folder), json.dumps(results)]

    monkeypatch.setattr(local_process, "pipeline_command", command)
