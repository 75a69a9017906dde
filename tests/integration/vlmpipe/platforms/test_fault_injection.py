"""Real training under faults ends as if nothing had happened. This is the short form of `make soak`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.crash.soak import CHANGES, NODES, Result, difference, disturbed, kills, result_of, table
from tests.support.trainer.runs import make_run, train_runs

pytestmark = [pytest.mark.timeout(300)]

RECLAIMED = "preempt:node=1,after_step=10,notice=5s"
SEED = 37  # one kill, of rank 0, after the reclaim


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def undisturbed(root: Path) -> Result:
    job = make_run(root, "undisturbed", CHANGES, features="off")
    train_runs([job], processes=1, nodes=NODES)
    return result_of(job)


def lines_of(root: Path, number: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / f"runs/round-{number}/faults.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_reclaimed_node_changes_nothing_and_the_notice_is_used(root: Path, undisturbed: Result) -> None:
    one = disturbed(root, 1, RECLAIMED, undisturbed)
    assert one.difference == "" and one.restarts == 1, "\n".join(table([one]))
    reclaim, after_reclaim = lines_of(root, 1)
    assert reclaim["event"] == "preempt"
    assert after_reclaim["exit_code"] == 75 and after_reclaim["steps_repeated"] == 0, "it saved before it went"


@pytest.mark.slow
def test_a_kill_after_it_changes_nothing(root: Path, undisturbed: Result) -> None:
    """`make soak` draws more of them."""
    one = disturbed(root, 2, f"{RECLAIMED};{kills(SEED, 1)}", undisturbed)
    assert one.difference == "" and len(one.kills) == 1, "\n".join(table([one]))
    _, _, kill, after_kill = lines_of(root, 2)
    assert kill["event"] == "kill" and after_kill["exit_code"] == 137 and kill["said_steps"] >= 22


@pytest.mark.slow
def test_the_soak_sees_a_difference(undisturbed: Result) -> None:
    """In a step made twice, in the last bit of a loss, and in a byte of the last checkpoint."""
    steps, files = undisturbed.steps, undisturbed.files
    other = [*steps[:-1], {**steps[-1], "loss": steps[-1]["loss"] * (1 + 2**-52)}]
    name = next(iter(files))
    assert "once each" in difference(Result([*steps, steps[-1]], files), undisturbed)
    assert difference(Result(other, files), undisturbed).startswith(f"step {len(steps)}: ")
    assert difference(Result(steps, {**files, name: files[name] ^ 1}), undisturbed).endswith(name)
