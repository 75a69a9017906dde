"""What a person gets for a mistake or a fault: a sentence, an exit code, and a second run that goes on from there.

Each command is a real one in a terminal of its own. The training is tiny but real: in the long form two nodes, a
process each.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.analysed_models import keep_analyses
from tests.support.disk import small_disk
from tests.support.short_form import WHOLE, chosen
from tests.support.terminal import Answer, Terminal, vlmpipe
from tests.support.wrong_input import EVERY_STEPS, FEW_STEPS, NUM_STEPS, RUN_FILE, refused, with_run_file
from vlmpipe.config.run_config import load_run_file
from vlmpipe.trainer.checkpoint.commit import REJECTED
from vlmpipe.trainer.errors import ExitCode

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def only_run(folder: Path) -> Path:
    (run,) = (folder / "runs" / "runs").iterdir()
    return run


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def logged_steps(run: Path) -> list[int]:
    """The steps in metrics.jsonl."""
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def committed_steps(run: Path) -> list[int]:
    """The steps of the run's checkpoints, the newest last."""
    return sorted(int(commit.parent.name.split("-")[1]) for commit in run.glob("checkpoints/*/COMMIT"))


# Faults in the middle of a run


@dataclass(frozen=True)
class Attempt:
    """One `vlmpipe run` of the same run. Steps are optimizer steps."""

    answer: Answer
    left: list[int]  # processes that were still there when the command had ended
    resumed_from: int | None  # step of the checkpoint that it continued from
    newest_before: int  # of the checkpoints that it found; 0 without any
    newest_after: int  # of those that it left


class Story:
    """A run that meets several faults, one after the other, and is started again with the same command each time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.attempts = folder, dict[str, Attempt]()

    @contextlib.contextmanager
    def attempt(self, name: str, *, more_steps: int = EVERY_STEPS) -> Iterator[Terminal]:
        """The block is entered when this attempt has saved a checkpoint, so many steps after the newest it found."""
        before = self._newest_step()
        with Terminal(self.folder, "run", RUN_FILE) as terminal:
            terminal.when(lambda: self._newest_step() >= before + more_steps)
            yield terminal
            answer, left = terminal.answer(), terminal.left()
        run = only_run(self.folder)
        log = run / "logs/train/workerpool0-0.log"
        said = re.search(r"continuing after step (\d+)", log.read_text() if log.exists() else "")
        self.attempts[name] = Attempt(answer, left, int(said[1]) if said else None, before, self._newest_step())

    def _newest_step(self) -> int:
        runs = self.folder / "runs" / "runs"
        return max((step for run in runs.glob("*") for step in committed_steps(run)), default=0)


def interrupted_story(folder: Path) -> Story:
    """Stopped, killed in part and as a whole, and damaged. `halted`, beside its folder, is a copy of the middle.

    In the short form the last attempt is stopped after its next checkpoint: test_quickstart.py has a run to its end.
    """
    story = Story(with_run_file(folder))
    with story.attempt("Ctrl-C", more_steps=2 * EVERY_STEPS) as terminal:
        terminal.press_ctrl_c()
    if WHOLE:  # the short form meets killed workers in test_local_retries.py
        with story.attempt("worker killed") as terminal:
            os.kill(terminal.worker(rank=1), signal.SIGKILL)
        with story.attempt("command killed") as terminal:
            terminal.process.kill()
    shutil.copytree(folder, folder.parent / "halted")
    damage(sorted(only_run(folder).glob("checkpoints/*/COMMIT"))[-1].parent)
    with story.attempt("newest damaged", more_steps=0 if WHOLE else 1) as terminal:
        if not WHOLE:
            terminal.press_ctrl_c()
    return story


def full_disk_story(folder: Path) -> Story:
    """The disk is full while data are prepared, and again in training; then there is room."""
    with small_disk(folder) as disk:
        story = Story(with_run_file(folder, **{"train.max_steps": FEW_STEPS, "cluster.replica_count": 1}))
        with story.attempt("preparing", more_steps=0) as terminal:
            disk.fill(terminal, leave_bytes=64 << 10)
        disk.free()
        with story.attempt("training") as terminal:
            disk.fill(terminal, leave_bytes=0)
        disk.free()
        with story.attempt("room", more_steps=0):
            """To the end."""
        shutil.copytree(folder, folder.parent / "kept")
    return story


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Story]:
    """All at once: most of their time goes into starting programs, one after the other."""
    folder = tmp_path_factory.mktemp("stories")
    keep_analyses(load_run_file(with_run_file(folder) / RUN_FILE))
    tellers = chosen(
        {"interrupted": interrupted_story, "full disk": full_disk_story}, lambda name: name == "interrupted"
    )
    with ThreadPoolExecutor() as pool:
        told = {name: pool.submit(teller, folder / name.replace(" ", "-")) for name, teller in tellers.items()}
        return {name: story.result() for name, story in told.items()}


@pytest.fixture
def interrupted(stories: dict[str, Story]) -> Story:
    return stories["interrupted"]


@pytest.fixture
def halted(interrupted: Story, tmp_path: Path) -> Path:
    """A copy of a folder with a run in the middle of training: data are prepared, checkpoints are there."""
    return shutil.copytree(interrupted.folder.parent / "halted", tmp_path / "halted")


def damage(checkpoint: Path) -> None:
    """Flip a bit in the middle of each of its data files."""
    for file in checkpoint.glob("*.distcp"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


def stopped(attempt: Attempt) -> None:
    """Assert that the command ended as one that was asked to stop in the middle of training should."""
    answer = attempt.answer
    assert answer.code == ExitCode.INTERRUPTED and "Traceback" not in answer.said, answer.said
    assert "■ train stopped" in answer.words and "✗" not in answer.said
    assert "Stopped in train: run tiny-" in answer.words
    assert f"a checkpoint at step {attempt.newest_after} of {NUM_STEPS} is saved" in answer.words
    assert f"to continue: vlmpipe run {RUN_FILE}" in answer.words


def test_ctrl_c_in_training_saves_a_checkpoint_and_says_how_to_resume(interrupted: Story) -> None:
    stopped(interrupted.attempts["Ctrl-C"])


@pytest.mark.slow
def test_a_killed_worker_fails_the_run_with_a_message(interrupted: Story) -> None:
    refused(
        interrupted.attempts["worker killed"].answer,
        128 + signal.SIGKILL,
        "step train failed with exit code 137",
        "the process of rank 1 was ended by SIGKILL",
        "if that was for lack of memory, lower train.micro_batch_size",
        "logs/train/workerpool1-0.log",
        f"continue: vlmpipe run {RUN_FILE}",
    )


@pytest.mark.slow
def test_a_killed_command_saves_a_checkpoint_and_leaves_nothing(interrupted: Story) -> None:
    """The terminal's context has waited until nothing was left."""
    attempt = interrupted.attempts["command killed"]
    assert attempt.answer.code == -signal.SIGKILL
    assert attempt.newest_after > attempt.newest_before


def test_no_process_outlives_a_command_that_ends_by_itself(stories: dict[str, Story]) -> None:
    attempts = {name: attempt for story in stories.values() for name, attempt in story.attempts.items()}
    assert [name for name, attempt in attempts.items() if attempt.left] in ([], ["command killed"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["worker killed", "command killed"])
def test_the_same_command_continues_the_run_from_its_newest_checkpoint(interrupted: Story, name: str) -> None:
    attempt = interrupted.attempts[name]
    assert "Continuing run tiny-" in attempt.answer.words
    assert attempt.resumed_from == attempt.newest_before > 0


def test_a_damaged_checkpoint_is_skipped_and_reported(interrupted: Story) -> None:
    attempt = interrupted.attempts["newest damaged"]
    assert attempt.resumed_from is not None and 0 < attempt.resumed_from < attempt.newest_before
    assert f"note: training continued after step {attempt.resumed_from}, because a newer" in attempt.answer.words
    assert re.search(rf"is damaged: \d+-0*{attempt.newest_before}-\w+: \S+ differs from its", attempt.answer.words)


def test_after_all_faults_every_step_was_done_once(interrupted: Story) -> None:
    attempt, steps = interrupted.attempts["newest damaged"], logged_steps(only_run(interrupted.folder))
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= attempt.newest_after > attempt.newest_before
    if not WHOLE:
        stopped(attempt)


@pytest.mark.slow
def test_after_all_faults_the_run_ends(interrupted: Story) -> None:
    run, answer = only_run(interrupted.folder), interrupted.attempts["newest damaged"].answer
    assert answer.code == 0, answer.said
    assert logged_steps(run)[-1] == NUM_STEPS
    assert read_json(run / "summary.json")["steps"] == NUM_STEPS
    assert (run / "export" / "model.safetensors").is_file() and (run / "report.html").is_file()


@pytest.mark.slow
def test_without_an_intact_checkpoint_nothing_is_deleted_or_restarted(halted: Path) -> None:
    run = only_run(halted)
    for commit in run.glob("checkpoints/*/COMMIT"):
        damage(commit.parent)
    before = {path: path.stat().st_mtime_ns for path in run.glob("checkpoints/*/*")}
    refused(
        vlmpipe(halted, "run", RUN_FILE),
        ExitCode.CHECKPOINT_CORRUPT,
        "no checkpoint of this run verifies",
        "restore the files (nothing was deleted), or start a new run (--fresh",
    )
    notes = set(run.glob(f"checkpoints/*/{REJECTED}"))
    assert {path: path.stat().st_mtime_ns for path in set(run.glob("checkpoints/*/*")) - notes} == before


@pytest.mark.slow
def test_fresh_starts_another_run_and_sigterm_stops_it_as_ctrl_c_does(halted: Path) -> None:
    old = only_run(halted)
    steps = logged_steps(old)

    def new() -> Path | None:
        return next((run for run in (halted / "runs" / "runs").iterdir() if run != old), None)

    with Terminal(halted, "run", RUN_FILE, "--fresh") as terminal:
        terminal.when(lambda: (run := new()) and logged_steps(run))
        terminal.process.terminate()
        answer = terminal.answer()
    run = new()
    assert run and f"Starting run {run.name}" in answer.words
    assert logged_steps(run)[0] == 1 and logged_steps(old) == steps
    stopped(Attempt(answer, [], None, 0, committed_steps(run)[-1]))


@pytest.mark.slow  # the short form, without the pipeline: tests/integration/trainer/monitoring/test_not_finite.py
def test_a_loss_that_is_not_a_number_ends_training_with_the_samples_that_it_came_from(halted: Path) -> None:
    refused(
        vlmpipe(halted, "run", RUN_FILE, "train.optimizer.learning_rate=1e30", "cluster.replica_count=1"),
        ExitCode.DATA,
        "the loss of step 2 is nan; this rank's samples: digit",
        "lower train.optimizer.learning_rate",
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["preparing", "training"])
def test_a_full_disk_is_reported(stories: dict[str, Story], name: str) -> None:
    refused(
        stories["full disk"].attempts[name].answer,
        ExitCode.CANNOT_WRITE,
        "failed with exit code 73",
        "no space left while ",
        "to do: free ",
        f"continue: vlmpipe run {RUN_FILE}",
    )


@pytest.mark.slow
def test_with_room_on_the_disk_the_same_command_completes_the_run(stories: dict[str, Story]) -> None:
    story = stories["full disk"]
    assert story.attempts["room"].answer.code == 0, story.attempts["room"].answer.said
    assert story.attempts["room"].resumed_from == story.attempts["training"].newest_after
    run = only_run(story.folder.parent / "kept")
    assert logged_steps(run) == list(range(1, FEW_STEPS + 1))
