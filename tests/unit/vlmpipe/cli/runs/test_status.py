"""`vlmpipe status`, `cancel` and `logs` of a run on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import Vlmpipe

DIGITS = "configs/digits.yaml"


@pytest.mark.usefixtures("fake_pipeline")
def test_status_shows_a_run_by_default_the_newest(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    assert "no run for @last" in vlmpipe("status", "--root", str(tmp_path)).err
    vlmpipe("run", DIGITS, f"output.root_uri={tmp_path}", "--run-id", "mine", "--plain")
    for name in ((), ("mine",)):
        assert "Accepted: above chance" in vlmpipe("status", *name, "--root", str(tmp_path)).out
    assert vlmpipe("status", str(tmp_path / "runs" / "mine"), "--json").json["run_id"] == "mine"
    watched = vlmpipe("status", "mine", "--root", str(tmp_path), "--watch", "--plain")
    assert (watched.code, "Accepted: above chance" in watched.out) == (0, True)
    over = vlmpipe("cancel", "mine", "--root", str(tmp_path))
    assert (over.code, "nothing to cancel" in over.err) == (64, True)
    logs = vlmpipe("logs", "mine", "--root", str(tmp_path)).out
    assert "this attempt started at" in logs
    lines = [json.loads(line) for line in vlmpipe("logs", "mine", "--root", str(tmp_path), "--json").out.splitlines()]
    assert [line["text"] for line in lines] == logs.splitlines()
    assert lines[0].keys() == {"time", "step", "process", "text"} and lines[0]["process"] == "pipeline"
    assert vlmpipe("logs", "mine", "--root", str(tmp_path), "--step", "train").code == 66
    missing = vlmpipe("status", "other", "--root", str(tmp_path))
    assert (missing.code, "one of the newest: mine" in missing.err) == (66, True)
