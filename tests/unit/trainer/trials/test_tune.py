"""What a trial reports."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vlmpipe.trainer.monitoring.hypertune import METRIC_FILE_VARIABLE
from vlmpipe.trainer.records.metrics import FILE
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import seal_lines
from vlmpipe.trainer.trials.tune import report


@pytest.mark.parametrize(("export", "value"), [("last", 0.7), ("best", 0.5)])
def test_a_trial_is_judged_by_the_step_that_a_run_would_export(
    export: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With early stopping the last validation is never the best one."""
    monkeypatch.setenv(METRIC_FILE_VARIABLE, str(tmp_path / "reported"))
    store = open_storage(str(tmp_path))
    losses = {2: 0.6, 4: 0.5, 6: 0.7}
    store.write(FILE, seal_lines({"step": step, "validation_loss": loss} for step, loss in losses.items()))
    Summary(steps=6, best_step=4, best_metric="validation_loss").write(store)
    run, checkpoint = SimpleNamespace(run_uri=str(tmp_path)), SimpleNamespace(export=export)
    job: Any = SimpleNamespace(run=run, checkpoint=checkpoint)
    assert report(job, "validation_loss") == value
    (line,) = map(json.loads, (tmp_path / "reported").read_text().splitlines())
    assert (line["validation_loss"], line["global_step"]) == (str(value), "6")
