"""Which further starts of a learning curve's share are not trained, and in what order a job trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trainer.runs import make_run
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.sweep import SHARE, Outcome, Sweep, SweepTraining, SweepVariant
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.trials.files import is_done
from vlmpipe.trainer.trials.sweep import _hopeless, _skip


def sweep_of(root: Path, metric: str = "exact_match", field: str = SHARE) -> Sweep:
    """Two starts of a small and of the largest share, whose first starts are done."""
    trainings = []
    for variant in ("small", "all"):
        for start in range(2):
            uri = make_run(root, f"curve/variants/{variant}/{start}", {}).run.run_uri
            training = SweepTraining(variant=variant, start=start, run_uri=uri, data_from=uri, features_from=uri)
            trainings.append(training)
            if start == 0:
                Outcome(state="done").write(open_storage(uri))
    variants = (SweepVariant(name="small", values={field: 0.1}), SweepVariant(name="all", values={field: 1.0}))
    fixed = {"baseline": "small", "starts": 2, "parallelism": 1, "jobs": ((0, 1, 2, 3),)}
    return Sweep(metric=metric, variants=variants, trainings=tuple(trainings), **fixed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("exact_match", "metric", "field", "hopeless"),
    [
        (0.2, "exact_match", SHARE, True),
        (0.1, "exact_match", SHARE, True),
        (0.21, "exact_match", SHARE, False),
        (0.2, "anls", SHARE, False),
        (0.2, "exact_match", "data.validation_fraction", False),
    ],
)
def test_a_further_start_is_left_out_where_the_first_is_at_the_baseline(
    tmp_path: Path, exact_match: float, metric: str, field: str, hopeless: bool
) -> None:
    sweep = sweep_of(tmp_path, metric, field)
    for training in sweep.trainings[::2]:
        Evaluation(exact_match=exact_match, chance=0.2).write(open_storage(training.run_uri))
    assert [bool(_hopeless(sweep, training)) for training in sweep.trainings] == [False, hopeless, False, False]
    if hopeless:
        _skip(sweep.trainings[1], _hopeless(sweep, sweep.trainings[1]))
        store = open_storage(sweep.trainings[1].run_uri)
        assert is_done(store) and Outcome.read(store).error.startswith("its first start answers")


def test_a_start_is_trained_while_the_first_is_not_done(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    Evaluation(exact_match=0.0, chance=0.2).write(open_storage(sweep.trainings[0].run_uri))
    Outcome(state="failed").write(open_storage(sweep.trainings[0].run_uri))
    assert _hopeless(sweep, sweep.trainings[1]) == ""
