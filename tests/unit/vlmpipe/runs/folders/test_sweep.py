"""How far the trainings of a sweep are."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpipe.runs.folders.sweep import work_done
from vlmpipe.trainer.records.step import StepRecord
from vlmpipe.trainer.records.sweep import Outcome, Sweep, SweepTraining, SweepVariant
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import RUN_FILE, write_record

SHARES = {"share-10": 0.1, "share-40": 0.4, "share-100": 1.0}


def write_sweep(folder: Path, values: dict[str, dict[str, float]]) -> None:
    trainings = []
    for name in values:
        uri = f"{folder}/variants/{name}/0"
        trainings.append(SweepTraining(variant=name, start=0, run_uri=uri, data_from=uri, features_from=uri))
    Sweep(
        metric="exact_match",
        baseline=next(iter(values)),
        starts=1,
        parallelism=1,
        variants=tuple(SweepVariant(name=name, values=of) for name, of in values.items()),
        trainings=tuple(trainings),
        jobs=(tuple(range(len(trainings))),),
    ).write(open_storage(str(folder)))


@pytest.mark.parametrize(("is_curve", "max_steps"), [(True, 0), (True, 300), (False, 0)])
def test_a_training_counts_by_its_share_and_one_under_way_by_its_steps(
    tmp_path: Path, is_curve: bool, max_steps: int
) -> None:
    fields = {name: {"data.train_share" if is_curve else "train.seed": share} for name, share in SHARES.items()}
    write_sweep(tmp_path, fields)
    first = open_storage(str(tmp_path / "variants/share-10/0"))
    write_record(first, RUN_FILE, {"train": {"max_steps": max_steps}})
    assert work_done(tmp_path) == 0
    Outcome(state="done").write(first)
    StepRecord("train", done=30, total=60).write(open_storage(str(tmp_path / "variants/share-40/0")))
    assert work_done(tmp_path) == pytest.approx((0.1 + 0.2) / 1.5 if is_curve and not max_steps else 1.5 / 3)


def test_a_sweep_without_its_file_has_done_nothing(tmp_path: Path) -> None:
    assert work_done(tmp_path) == 0
