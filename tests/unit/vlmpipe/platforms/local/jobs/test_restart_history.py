"""What a restart costs: nothing where the chief, which holds the steps, goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpipe.platforms.local.jobs.restart_history import RestartHistory
from vlmpipe.platforms.local.jobs.restart_policy import Restart
from vlmpipe.platforms.local.jobs.supervisor import Verdict
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record

CHIEF, WORKER = "workerpool0-0", "workerpool1-0"


@pytest.mark.parametrize(("replicas", "repeated"), [((WORKER,), 0), ((CHIEF, WORKER), 120), ((), 120)])
def test_steps_are_made_twice_only_if_the_chief_starts_again(
    tmp_path: Path, replicas: tuple[str, ...], repeated: int
) -> None:
    store = LocalStorage(tmp_path)
    write_record(store, "steps/train.json", {"done": 120, "started_s": 1.0})
    history = RestartHistory(store, "train", CHIEF, None)
    history.add(Restart(replicas, "restart 1 of 3"), Verdict(137, WORKER))
    assert [one.steps_repeated for one in history.restarts] == [repeated]
