"""A sweep's files, for those who write them and those who read them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import read_record

SWEEP_FILE = "sweep.json"  # in the folder of the sweep's run
OUTCOME = "outcome.json"  # in a training's folder
FEATURES_ERROR = "features_error.json"  # beside it, where its images could not be encoded
JOB_STEP = "train-variants"  # the step of a job is this with its number


def settings_sha256(run_json: Mapping[str, Any]) -> str:
    """sha256 (hex) of what a training's scores depend on."""
    own = {name: run_json.get(name) for name in ("model", "data", "features", "train", "evaluate")}
    own["train"] = {name: value for name, value in run_json["train"].items() if name != "resume"}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def outcome_of(store: Storage) -> dict[str, Any]:
    """Outcome of a training; empty where it has not ended."""
    return read_record(store, OUTCOME) if store.stat(OUTCOME) else {}


def is_done(store: Storage) -> bool:
    """Return whether a training is not to be trained: an earlier start of the sweep's job did, or with train.resume
    auto an earlier submission."""
    outcome = outcome_of(store)
    if outcome.get("state") != "done":
        return False
    content = read_record(store, "run.json")
    return content["train"].get("resume") != "never" or outcome.get("submission") == content["run"].get("submission")
