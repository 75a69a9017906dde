"""A learning curve on digits from its run file to its record: one preparation, nested shares, and no training twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.comparison.curve.write import write_curve
from vlmpipe.components.runtime.parameters import compiled_settings
from vlmpipe.components.runtime.resolve import resolve
from vlmpipe.components.runtime.run_results import close_run
from vlmpipe.components.runtime.sweep_steps import (
    encode_features,
    open_jobs,
    preparations,
    prepare_variant_data,
    train_variants,
)
from vlmpipe.config.run_config import parse_run_config
from vlmpipe.records.learning_curve import LearningCurve
from vlmpipe.runs.folders.curve import curve_lines
from vlmpipe.trainer.errors import ConfigError, DataError
from vlmpipe.trainer.records.sweep import SHARE, Sweep
from vlmpipe.trainer.storage import open_storage

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all curves of this module share prepared data."""
    return tmp_path_factory.mktemp("curves")


def opened(root: Path, job_name: str, shares: list[float], **changes: object) -> tuple[str, Sweep]:
    """Resolve and prepare the curve of a tiny model. Returns its folder and its sweep.json."""
    fields = {
        "sweep": {"grid": {SHARE: shares}, "starts": 1, "trainings_per_job": 9, "goal": 0.9},
        "data.max_samples": 80,
        "data.validation_fraction": 0.3,
        "features.cache": "off",
        "train.global_batch_size": 2,
        "train.epochs": 1,
        "evaluate.controls": [],
        "evaluate.max_samples": 12,
        "output.root_uri": str(root),
        "cluster.processes_per_replica": 1,
    }
    config = parse_run_config(merged(TINY, {**fields, **changes}), "a test")
    found = resolve(json.dumps(config.to_dict()), compiled_settings(config, "local", str(root)), job_name=job_name)
    (leader,) = preparations(found.run_uri)  # the only folder with data, for all shares and starts
    prepare_variant_data(leader)
    encode_features(leader, "local")  # says that none are cached
    return found.run_uri, Sweep.read(open_storage(found.run_uri))


@pytest.mark.slow
def test_a_curve_of_three_points(root: Path) -> None:
    uri, _ = opened(root, "curve-1", [0.3, 0.6, 1.0])
    assert len(list((root / "prepared").iterdir())) == 1
    (job,) = open_jobs(uri)
    assert train_variants(job, "local").endswith("done")
    assert open_jobs(uri) == [], "started again, it trains nothing twice"
    curve = write_curve(uri)
    close_run(uri, "done")  # which writes the report again
    assert 'id="curve"' in open_storage(uri).read("report.html").decode()
    assert curve and LearningCurve.read(open_storage(uri)).content() == curve.content()
    counts = [point.samples for point in curve.points]
    assert [point.share for point in curve.points] == [0.3, 0.6, 1.0] and counts == sorted(counts)
    assert all(count >= round(point.share * counts[-1]) for count, point in zip(counts, curve.points, strict=True))
    assert all(point.score and point.starts == 1 for point in curve.points)
    assert curve.questions >= 10 and curve.epochs == 1 and curve.cost and curve.baseline is not None
    assert curve_lines(curve)[0].lower().startswith(curve.decision[:20].lower())


def test_too_few_validation_samples_and_a_share_below_a_batch_end_it_before_a_training(root: Path) -> None:
    uri, _ = opened(root, "few-1", [0.3, 0.6, 1.0], **{"evaluate.max_samples": 9})
    with pytest.raises(DataError, match="by 9 validation samples"):
        open_jobs(uri)
    uri, _ = opened(root, "small-1", [0.01, 0.6, 1.0], **{"train.global_batch_size": 8})
    with pytest.raises(ConfigError, match=r"samples of data.train_share 0.01 are"):
        open_jobs(uri)
