"""`vlmpipe compare` over the runs of a folder."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.command_line import Vlmpipe
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import seal_lines, write_record


def test_runs_are_compared_as_table_json_page_and_parquet(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    for name, said in (("first", "blue"), ("second", "red"), ("other", "red")):
        store = LocalStorage(tmp_path / "runs" / name)
        line = {"turn": 0, "slice": "all", "question": f"What? {name == 'other'}", "answer": "red"}
        line |= {"prediction": said, "correct": said == "red"}
        store.write("predictions.jsonl", seal_lines([line | {"id": one, "image_group": one} for one in "abcdef"]))
        records = {
            "run": {"name": "x"},
            "evaluate": {"questions": 1},
            "prepared": {"prepared_uri": str(tmp_path), "features_uri": "", "features": "off"},
        }
        for file, content in records.items():
            write_record(store, f"{file}.json", content)
    compared = ("compare", "first", "second", "--root", str(tmp_path))
    answer = vlmpipe(*compared, "--html", str(tmp_path / "a.html"), "--predictions", str(tmp_path / "a.parquet"))
    assert answer.code == 0 and "+1.000" in answer.out and "better" in answer.out
    assert "+1.000" in (tmp_path / "a.html").read_text() and (tmp_path / "a.parquet").stat().st_size > 0
    found = json.loads(vlmpipe(*compared, "--json").out)
    assert found["scores"][0]["runs"][1]["difference"] == 1.0
    assert found["disagreements"][0]["predictions"] == ["blue", "red"]
    answer = vlmpipe("compare", "first", "other", "--root", str(tmp_path))
    assert (answer.code, answer.out) == (65, "")
    assert "error: the runs share no question: first 6, other 6" in answer.err
