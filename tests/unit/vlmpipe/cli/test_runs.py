"""`vlmpipe status` and `vlmpipe compare` over the runs of a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import Vlmpipe
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import seal_lines, write_record

DIGITS = "configs/digits.yaml"


def test_runs_are_compared_as_table_json_page_and_parquet(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    for name, said in (("first", "blue"), ("second", "red"), ("other", "red")):
        store = LocalStorage(tmp_path / "runs" / name)
        line = {"id": "a", "turn": 0, "slice": "all", "question": f"What? {name == 'other'}", "answer": "red"}
        store.write("predictions.jsonl", seal_lines([line | {"prediction": said, "correct": said == "red"}]))
        records = {"run": {"name": "x"}, "evaluate": {"questions": 1}, "prepared": {"prepared_uri": str(tmp_path)}}
        for file, content in records.items():
            write_record(store, f"{file}.json", content)
    compared = ("compare", "first", "second", "--root", str(tmp_path))
    answer = vlmpipe(*compared, "--html", str(tmp_path / "a.html"), "--predictions", str(tmp_path / "a.parquet"))
    assert answer.code == 0 and "+1.0000" in answer.out and "better" in answer.out
    assert "+1.000" in (tmp_path / "a.html").read_text() and (tmp_path / "a.parquet").stat().st_size > 0
    found = json.loads(vlmpipe(*compared, "--json").out)
    assert found["scores"][0]["runs"][1]["difference"] == 1.0
    assert found["disagreements"][0]["predictions"] == ["blue", "red"]
    answer = vlmpipe("compare", "first", "other", "--root", str(tmp_path))
    assert (answer.code, answer.out) == (65, "")
    assert "error: the runs share no question: first 1, other 1" in answer.err


@pytest.mark.usefixtures("fake_pipeline")
def test_status_lists_runs_and_shows_one(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    assert "No runs" in vlmpipe("status", "--root", str(tmp_path)).out
    vlmpipe("run", DIGITS, f"output.root_uri={tmp_path}", "--run-id", "mine", "--plain")
    listed = vlmpipe("status", "--root", str(tmp_path)).out.splitlines()[-1].split()
    assert (listed[0], listed[-3:]) == ("mine", ["94.0", "%", "accepted"])
    assert "Accepted: above chance" in vlmpipe("status", "mine", "--root", str(tmp_path)).out
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
