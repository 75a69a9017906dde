"""The part that measures replay, with runs that leave records alone: what it asks for, and what it makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evaluation import replay as part
from benchmarks.support.progress import Progress
from benchmarks.support.report import Report
from benchmarks.support.suite import Bench
from vlmpipe.config.run_config import load_run_file
from vlmpipe.trainer.records.evaluation import Evaluation, Retention, StartScores
from vlmpipe.trainer.records.replay import ReplayAnswers, ReplayPointer
from vlmpipe.trainer.storage import open_storage


class Recorded(part.Files):
    """Runs that are checked and not run, of which replay forgets `left` of 0.4."""

    left = 0.1

    def run(self, run_id: str, content: dict[str, Any]) -> None:
        path = self._folder / f"{run_id}.yaml"
        path.write_text(json.dumps(content), encoding="utf-8")
        store = self._store(run_id)
        if run_id == part.START:
            (self._root / "runs" / run_id / "export").mkdir(parents=True)
            store.write("export/vlmpipe.json", b"{}")
        config = load_run_file(path)
        if run_id == part.START:
            assert config.data.source == "builtin:easy-vqa" and config.model.drawn_parts
            return
        [benchmark] = config.evaluate.benchmarks
        assert not config.model.drawn_parts and Path(benchmark.uri).is_file()
        lost = self.left if config.data.replay else 0.4
        start = StartScores(retention=Retention(form="benchmarks", questions=9, before=0.8, after=0.8 - lost))
        Evaluation(start=start).write(store)
        if config.data.replay:
            ReplayPointer(folder=str(self._root / "replay")).write(store)
            ReplayAnswers(answered=7, answer_tokens=21, answer_s=2.0).write(open_storage(str(self._root / "replay")))


def measured(folder: Path, monkeypatch: pytest.MonkeyPatch, left: float) -> Report:
    monkeypatch.setattr(Recorded, "left", left)
    monkeypatch.setattr(part, "Files", Recorded)
    report, progress = Report("Evaluation"), Progress(1)
    progress.begin("replay", 1.0, 1.0)
    part.replay(Bench(report, folder, progress, 1, quick=False))
    return report


def test_forgotten_points_and_costs_are_those_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(tmp_path, monkeypatch, 0.1).rows
    forgotten = {row.data.partition("seeds: ")[2]: row.ours for row in rows if row.claim == "forgotten"}
    assert forgotten == pytest.approx(dict(zip(part.SOURCES, (40, 10, 10), strict=True)))
    assert [row.ours for row in rows if row.claim != "forgotten"] == [2.0, 21, 2.0, 21]
    asked = json.loads((tmp_path / "questions.json").read_text())
    assert {question["imgname"] for question in asked} == {f"{number}.png" for number in range(1, part.IMAGES + 1)}
    assert all((tmp_path / "images" / question["imgname"]).is_file() for question in asked)


def test_the_part_fails_where_more_than_half_is_still_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=r"21.0 of 40.0 points"):
        measured(tmp_path, monkeypatch, 0.21)
