"""The course of a rehearsed run: every task begins before it ends, and stages follow each other."""

from __future__ import annotations

import itertools

import pytest

from vlmpipe.rehearsal.serve import moves_of


@pytest.mark.parametrize("stages", [[""], ["align", "finetune"]], ids=["one training", "stages"])
@pytest.mark.parametrize("shares", [False, True], ids=["one task", "several tasks"])
def test_tasks_begin_and_end_in_order(stages: list[str], shares: bool) -> None:
    prefixes = [f"{stage}-" if stage else "" for stage in stages]
    tasks = {f"{prefix}{name}" for prefix in prefixes for name in ("plan-data", "prepare-chunks")} if shares else set()
    moves = moves_of(stages, tasks)
    states: dict[str, str] = {}
    begun: list[str] = []
    for move in moves:
        for name, state in move.tasks.items():
            assert (states.get(name), state) in {(None, "RUNNING"), ("RUNNING", "SUCCEEDED"), (None, "NOT_TRIGGERED")}
            states[name] = state
            begun += [name] if state == "RUNNING" else []
    assert set(states.values()) == {"SUCCEEDED", "NOT_TRIGGERED"}
    assert [name for name in begun if name.endswith("resolve-run")] == [f"{prefix}resolve-run" for prefix in prefixes]
    assert begun[-1] == "notify" and moves[-1].job == "SUCCEEDED" and tasks <= set(begun)
    for before, after in itertools.pairwise(prefixes):
        assert begun.index(f"{before}decide") < begun.index(f"{after}resolve-run")
