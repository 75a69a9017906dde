"""The shell completes commands, run files and run ids."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import Vlmpipe
from vlmpipe.cli import app as cli
from vlmpipe.runs.submitted import RunRecord


@pytest.fixture
def complete(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[[str], list[str]]:
    """What bash offers for the last word of a line typed in `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def call(line: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["vlmpipe"])
        monkeypatch.setenv("_VLMPIPE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
        with pytest.raises(SystemExit):
            cli.main()
        return capfd.readouterr().out.split()

    return call


def test_the_shell_completes_commands_run_files_and_run_ids(
    complete: Callable[[str], list[str]], tmp_path: Path
) -> None:
    for name in ("own.yaml", "notes.txt", "configs/a.yaml", "configs/b.yml", "runs/runs/first-1/local.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    RunRecord("projects/p/locations/l/pipelineJobs/sent-1", "gs://b/r", 0.0).write("sent-1")
    assert complete("vlmpipe che") == ["check"]
    assert complete("vlmpipe runs p") == ["prune", "page"]
    assert complete("vlmpipe check ") == ["configs/a.yaml", "configs/b.yml", "own.yaml"]
    assert complete("vlmpipe plan configs/") == ["configs/a.yaml", "configs/b.yml"]
    assert complete("vlmpipe compile o") == ["own.yaml"]
    assert set(complete("vlmpipe logs ")) == {"@last", "first-1", "sent-1"}
    assert complete("vlmpipe status fi") == ["first-1"]


def test_completion_can_be_installed(vlmpipe: Vlmpipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))  # which the tests may not run under
    assert "complete -o default -F _vlmpipe_completion vlmpipe" in vlmpipe("--show-completion").out
    assert "--install-completion" in vlmpipe("--help").out
