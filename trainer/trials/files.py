"""Rules by which a sweep's trainings are continued."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.records.sweep import Outcome
from vlmpipe.trainer.storage.base import Storage


def settings_sha256(run_json: Mapping[str, object]) -> str:
    """sha256 (hex) of what a training's scores depend on, as its run.json has it."""
    sections = {name: run_json.get(name) for name in ("model", "data", "features", "train", "evaluate")}
    train = sections["train"]
    assert isinstance(train, Mapping)
    sections["train"] = {name: value for name, value in train.items() if name != "resume"}
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()


def is_done(store: Storage) -> bool:
    """Return whether a training is not to be trained: an earlier start of the sweep's job did, or with train.resume
    auto an earlier submission."""
    outcome = Outcome.read_if_there(store)
    if outcome is None or outcome.state == "failed":
        return False
    job = JobConfig.read(store)
    return job.train.resume != "never" or outcome.submission == job.run.submission
