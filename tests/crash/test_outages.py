"""Stores that are away and disks that fill in each phase of a run: real training, compared with an undisturbed run."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.crash.cases import FULL, case
from tests.support.crash.phases import PHASES, SAVED_EVERY, STEPS
from tests.support.crash.world import ended
from vlmpipe.trainer.errors import ExitCode

pytestmark = pytest.mark.skipif(not FULL, reason="make crash-matrix runs it: it trains 20 times")
SAVES = ("upload", "manifest", "COMMIT", "last save")
AFTER_COMMIT = ("after COMMIT", "retention")
CODES = {"store": ExitCode.UNAVAILABLE, "disk": ExitCode.CANNOT_WRITE}
OF_STORE = [phase for phase in PHASES if phase != "start"]
OF_DISK = [phase for phase in OF_STORE if phase != "retention"]  # a full disk refuses no deletion
FOR_EVER = ("upload", "end")
SAME = "training continues: its steps, losses and weights are the undisturbed run's, and nothing half-written is left"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All runs, in one process."""
    cases = [
        *(f"store {phase}" for phase in PHASES),
        *(f"disk {phase}" for phase in ("start", *OF_DISK)),
        *(f"{place} {phase} for ever" for place in CODES for phase in FOR_EVER),
        "temporary upload",
    ]
    done = ended("", "tests.support.crash.training_program", str(tmp_path_factory.mktemp("runs")), *cases)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def require_undisturbed(run: dict[str, Any], runs: dict[str, Any]) -> None:
    """The run has the undisturbed one's steps, losses and weights, and its folders are those of its checkpoints."""
    expected = runs["undisturbed"]
    assert expected["steps"] == list(range(1, STEPS + 1)) and expected["files"] and not expected["warnings"]
    for what in ("steps", "losses", "files", "summary", "committed", "folders"):
        assert run[what] == expected[what], what


def require_goes_on(run: dict[str, Any], phase: str, runs: dict[str, Any]) -> None:
    assert run["code"] == 0, run["error"]
    require_undisturbed(run, runs)
    assert run["state"] == "done"
    said = [re.sub(r"^train: warning: ", "", line) for line in run["warnings"]]
    assert said and set(run["notes"]) <= set(said)
    if phase in SAVES:
        first = STEPS if phase == "last save" else SAVED_EVERY
        assert len(said) == 2 and f"the checkpoint of step {first} is not saved: " in said[0]
    elif phase == "after COMMIT":
        assert len(said) == 2 and all("LATEST does not name" in text for text in said)
    elif phase == "retention":
        assert len(said) == 1 and "are not deleted: " in said[0]
    else:  # once each
        assert sum("metrics.jsonl is not written: " in text for text in said) == 1
        assert sum("steps/train.json is not written: " in text for text in said) == 1


@case("outage", "the store is away for a while, in the phase “{}”", SAME, short=OF_STORE[:1], phase=OF_STORE)
def test_the_store_is_away(phase: str, runs: dict[str, Any]) -> None:
    require_goes_on(runs[f"store {phase}"], phase, runs)


@case("outage", "the run's disk is full for a while, in the phase “{}”", SAME, short=OF_DISK[:1], phase=OF_DISK)
def test_the_disk_is_full(phase: str, runs: dict[str, Any]) -> None:
    require_goes_on(runs[f"disk {phase}"], phase, runs)


@case("outage", "the disk for temporary files cannot be written while a checkpoint is saved", SAME)
def test_the_temporary_disk_cannot_be_written(runs: dict[str, Any]) -> None:
    require_goes_on(runs["temporary upload"], "upload", runs)


@case(
    "outage",
    "at the start, the {} takes nothing",
    "it ends with 69 or 73 and has changed nothing; the same command trains to the undisturbed run's weights",
    short=("store",),
    place=CODES,
)
def test_nothing_is_taken_at_the_start(place: str, runs: dict[str, Any]) -> None:
    run = runs[f"{place} start"]
    assert run["code"] == CODES[place] and run["changed"] == [] and run["again"] == 0
    require_undisturbed(run, runs)


@case(
    "outage",
    "the {} takes no checkpoint any more",
    "it ends with 69 or 73 after checkpoint.max_s_without_commit, and says since when; the same command trains to the "
    "undisturbed run's weights",
    short=("store",),
    place=CODES,
)
def test_no_checkpoint_is_taken_any_more(place: str, runs: dict[str, Any]) -> None:
    run = runs[f"{place} upload for ever"]
    assert run["code"] == CODES[place] and run["again"] == 0 and run["committed_then"] == []
    assert re.match(r"no checkpoint was committed since [\d-]+ [\d:]+ UTC, \d+ tries in \d+ s: ", run["error"])
    require_undisturbed(run, runs)


@case(
    "outage",
    "after the last step, the {} takes no metrics and no summary any more",
    "it ends with 69 or 73 after checkpoint.max_s_without_commit; the last checkpoint is committed",
    short=("store",),
    place=CODES,
)
def test_no_summary_is_taken_any_more(place: str, runs: dict[str, Any]) -> None:
    run = runs[f"{place} end for ever"]
    assert run["code"] == CODES[place] and run["again"] == 0 and run["committed_then"] == [STEPS]
    assert run["error"].startswith("writing metrics and summary failed since ")
    assert run["files"] == runs["undisturbed"]["files"] and run["summary"] == STEPS
