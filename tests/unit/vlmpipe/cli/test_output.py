"""One JSON document on standard output, whatever a command prints and however it ends; and Ctrl-C in each."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tests.support.command_line import Vlmpipe
from tests.support.paths import ROOT
from vlmpipe import api
from vlmpipe.cli.app import app
from vlmpipe.cli.output import begin, print_error, print_json
from vlmpipe.trainer.errors import ExitCode, UserError

WRONG = UserError("found", code=ExitCode.DATA)


def test_an_error_after_the_document_is_no_second_one(capsys: pytest.CaptureFixture[str]) -> None:
    begin()
    print_json({"exit_code": 65})
    print_error(WRONG, as_json=True)
    said = capsys.readouterr()
    assert json.loads(said.out) == {"exit_code": 65} and said.err == "error: found\n"


def test_an_error_without_a_document_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    begin()
    print_error(WRONG, as_json=True)
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == ExitCode.DATA


def test_two_documents_are_a_mistake_of_ours() -> None:
    begin()
    print_json({})
    with pytest.raises(AssertionError):
        print_json({})
    begin()


def test_each_command_of_a_process_has_a_document_of_its_own() -> None:
    """Also where a program calls the command line without `main`."""
    for _ in range(2):
        answer = CliRunner().invoke(app, ["check", str(ROOT / "configs" / "digits.yaml"), "--json"])
        assert json.loads(answer.stdout)["ok"], answer.exception


@pytest.mark.parametrize("name", ["check", "plan", "doctor", "compile"])
def test_ctrl_c_ends_a_command_in_a_sentence(name: str, vlmpipe: Vlmpipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the command itself has nothing to save; run, tune and status --watch have tests of their own."""

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, name, interrupted)
    answer = vlmpipe(name, "configs/digits.yaml")
    assert (answer.code, answer.out) == (ExitCode.INTERRUPTED, "")
    assert answer.err.endswith("stopped by Ctrl-C\n") and "Traceback" not in answer.err
