"""Which questions the champion may be asked: none of data that it was trained on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.data.index import write_index
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.evaluation.batch_budget import BatchBudget
from vlmpipe.trainer.evaluation.metrics import Prediction, Question
from vlmpipe.trainer.evaluation.validation import champion as rescoring
from vlmpipe.trainer.evaluation.validation.champion import not_trained_on, rescore
from vlmpipe.trainer.evaluation.validation.champion_pointer import ChampionPointer
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record

HELD_OUT = {"new": ["x"], "moved": ["y"], "same picture": ["z"], "two pictures": ["v", "z"], "text": []}
TRAINED = {"moved": ["another"], "elsewhere": ["z"], "text of others": []}
FAIR = ["new", "new", "text", "text"]


def questions(held_out: Any) -> list[Question]:
    return [
        Question(number, identity, turn, "all", "Which?", "this", "")
        for number, identity in enumerate(held_out.ids)
        for turn in range(2)
    ]


@pytest.fixture
def held_out(tmp_path: Path) -> Any:
    return Index.load(str(write_index(tmp_path / "held-out", HELD_OUT))).split("eval")


def test_questions_of_its_samples_or_about_its_images_are_left_out(tmp_path: Path, held_out: Any) -> None:
    trained = Index.load(str(write_index(tmp_path / "trained", TRAINED, "train"))).split("train")
    fair = not_trained_on(trained, held_out, questions(held_out))
    assert [one.id for one in fair] == FAIR


def test_what_is_left_out_is_not_asked_and_counted(
    tmp_path: Path, held_out: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    its_data = write_index(tmp_path / "trained", TRAINED, "train")
    its_run = LocalStorage(tmp_path / "champion")
    write_record(its_run, "run.json", {"name": "its"})
    write_record(its_run, "prepared.json", {"prepared_uri": "", "features_uri": "", "features": "off"})
    write_record(its_run, rescoring.EXPORT, {"checkpoint": "c1"})
    evaluate = SimpleNamespace(batch_questions=3, batch_tokens=100)

    def run_of(data: Path) -> Any:
        pointers = SimpleNamespace(prepared_uri=str(data))
        return SimpleNamespace(pointers=lambda: pointers, evaluate=evaluate, model=None, model_copy=lambda update: own)

    own = run_of(its_data)

    def answered(_job: Any, _asking: Any, batch: Any, _device: Any) -> list[Prediction]:
        return [Prediction(one.id, one.turn, "all", "Which?", "this", "this", True, "stop") for one, _ in batch]

    monkeypatch.setattr(rescoring, "JobConfig", SimpleNamespace(read=lambda *_: own))
    for name in ("load_export", "image_form_of", "open_prepared", "_asked"):
        monkeypatch.setattr(rescoring, name, lambda *_: (None, None))
    budgets = list[BatchBudget]()
    monkeypatch.setattr(rescoring, "AnsweringModel", lambda *parts: budgets.append(parts[-1]))
    monkeypatch.setattr(rescoring, "Chat", SimpleNamespace(load=lambda *_: None))
    monkeypatch.setattr(rescoring, "answer", answered)
    monkeypatch.setattr(rescoring.dist, "all_gather_object", lambda everyone, one: everyone.__setitem__(0, one))
    pointer = ChampionPointer(version=1, run_id="champion", run_uri=str(tmp_path / "champion"), checkpoint="c1")
    worker = cast(ProcessContext, SimpleNamespace(world_size=1, device=None))
    subject = cast(Any, SimpleNamespace(split=held_out))
    asked = questions(held_out)
    reduced = BatchBudget(50, out_of_memory=1)  # by this run's model, of batch_tokens' 100
    result = rescore(run_of(tmp_path / "held-out"), pointer, subject, asked, reduced, worker)
    assert budgets == [reduced], "the champion's batches begin where this run's model's ended"
    assert (result.obstacle, result.in_its_training) == ("", len(asked) - len(FAIR))
    assert sorted(one.id for one in result.predictions) == FAIR
    none_fair = [one for one in asked if one.id not in FAIR]
    obstacle = rescore(run_of(tmp_path / "held-out"), pointer, subject, none_fair, reduced, worker).obstacle
    assert obstacle == "all questions are of data that it was trained on"


def test_a_champion_of_another_version_is_named_with_what_its_run_has(tmp_path: Path, held_out: Any) -> None:
    its_run = LocalStorage(tmp_path)
    content = merged(TINY, {"run": {"run_id": "its", "root_uri": str(tmp_path)}, "train.of_before": 1})
    write_record(its_run, "run.json", content)
    write_record(its_run, "prepared.json", {"prepared_uri": "", "features_uri": "", "features": "off"})
    write_record(its_run, rescoring.EXPORT, {"checkpoint": "c1"})
    pointer = ChampionPointer(version=1, run_id="its", run_uri=str(tmp_path), checkpoint="c1")
    job, subject = cast(Any, SimpleNamespace(evaluate=None)), cast(Any, SimpleNamespace(split=held_out))
    worker = cast(ProcessContext, SimpleNamespace(world_size=1, device=None))
    found = rescoring._answers(job, pointer, subject, questions(held_out), BatchBudget(1), worker)
    assert "run.json is not of this version of vlmpipe, by train.of_before" in found.obstacle
