"""Searches for tests: of the shipped run file digits, from a run that counts as trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from tests.support.pipelines.example_project import load_for_vertex
from vlmpipe.config.run_config import RunConfig
from vlmpipe.pipelines.tune.search import Search, open_search
from vlmpipe.trainer.storage import open_storage

DIGITS = ROOT / "configs/digits.yaml"
RATE, ROWS, PRECISION = "train.optimizer.learning_rate", "train.micro_batch_size", "train.precision"
LOG = {"double_value_spec": {"min_value": 1e-4, "max_value": 1e-2}, "scale_type": "UNIT_LOG_SCALE"}
PARAMETERS: dict[str, Any] = {
    RATE: LOG,
    ROWS: {"discrete_value_spec": {"values": [1, 2]}},
    PRECISION: {"categorical_value_spec": {"values": ["fp32", "bf16"]}},
}


def config(*more: str, **tuning: Any) -> RunConfig:
    """`more`: overrides of the run file; `tuning`: fields of its section tune."""
    section = {"parameters": PARAMETERS, "max_trial_count": 6, "parallel_trial_count": 2, **tuning}
    wanted = ["cluster.replica_count=1", "gcp.project=test-project", f"tune={json.dumps(section)}", *more]
    return load_for_vertex(DIGITS, wanted)


def opened(wanted: RunConfig, root: Path | str, search_id: str = "digits-tune-1") -> Search:
    run = open_storage(f"{root}/runs/base")
    pointers = {"prepared_uri": f"{root}/prepared/f", "features_uri": f"{root}/features/k", "features": "reuse"}
    for name, content in (("run", wanted.to_dict()), ("prepared", pointers), ("summary", {})):
        run.write(f"{name}.json", json.dumps(content).encode())
    found = open_search(wanted, "base", search_id, str(root))
    found.write()
    return found
