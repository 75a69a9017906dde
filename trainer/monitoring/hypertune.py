"""Reports the metric of a search's trial, in the format of google/cloudml-hypertune.

The service reads a file of JSON lines on the chief's machine. Early stopping needs a line after each validation, which
the metrics log reports if `vlmpipe.trainer.trials.tune` asks for it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

TRIAL_VARIABLE = "CLOUD_ML_TRIAL_ID"
METRIC_FILE_VARIABLE = "CLOUD_ML_HP_METRIC_FILE"
METRIC_FILE = "/tmp/hypertune/output.metrics"  # where the service reads
WATCHED_VARIABLE = "VLMPIPE_TRIAL_METRIC"  # metric that the metrics log reports
VALIDATION_LOSS = "validation_loss"
MAX_LINES = 100  # as the library keeps


def report(metric: str, value: float, step: int) -> None:
    """Report the metric's value after optimizer step `step`, replacing an earlier report of that step."""
    path = Path(os.environ.get(METRIC_FILE_VARIABLE, METRIC_FILE))
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    earlier = [line for line in lines if json.loads(line)["global_step"] != str(step)]
    line = {
        "timestamp": time.time(),
        "trial": os.environ.get(TRIAL_VARIABLE, "0"),
        metric: str(float(value)),
        "global_step": str(step),
    }
    text = "\n".join([*earlier, json.dumps(line, sort_keys=True)][-MAX_LINES:])
    temporary = path.with_name(f"{path.name}.new")  # the service may read at any moment
    temporary.write_text(f"{text}\n", encoding="utf-8")
    temporary.replace(path)


def report_measured(values: dict[str, float], step: int) -> None:
    """Report the watched metric of this process's trial, if it is among `values`."""
    metric = os.environ.get(WATCHED_VARIABLE, "")
    if metric in values:
        report(metric, values[metric], step)
