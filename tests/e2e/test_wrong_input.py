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
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.data.prepared import llava_folder, record, write_json
from tests.support.disk import small_disk
from tests.support.short_form import WHOLE, chosen, only_whole
from tests.support.terminal import Answer, Terminal, vlmpipe
from tests.support.trainer.runs import TINY, merged
from vlmpipe.trainer.checkpoint.commit import REJECTED
from vlmpipe.trainer.errors import ExitCode

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

RUN_FILE = "tiny.yaml"
NUM_STEPS, FEW_STEPS = 160 if WHOLE else 100, 60
EVERY_STEPS = 20  # between checkpoints
CHANGES = {
    "train.max_steps": NUM_STEPS,
    "train.epochs": 1000,
    "train.checkpoint_every_steps": EVERY_STEPS,
    "evaluate.controls": [],
    "cluster": {"replica_count": 2 if WHOLE else 1},  # what more replicas add is in test_local_retries.py
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a run file, to run commands in."""
    return with_run_file(tmp_path / "place")


def with_run_file(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / RUN_FILE).write_text(json.dumps(merged(TINY, CHANGES | changes), indent=1))
    return folder


def refused(answer: Answer, code: int, *words: str) -> None:
    """Assert that the command ended as a mistake should: in words, with this code, and without a stack trace."""
    assert answer.code == code, answer.said
    assert "error: " in answer.said and "Traceback" not in answer.said
    for word in words:
        assert word in answer.words, answer.said


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


# Mistakes that are found before anything starts


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([RUN_FILE, "train.global_batch_row=8"], ["train.global_batch_row: unknown key, did you mean train.global"]),
        (["tini.yaml"], ["no run file tini.yaml", "expected: the path of a YAML run file"]),
        ([RUN_FILE, "train.micro_batch_size=3"], ["global_batch_size 8 must be a multiple of micro_batch_size 3"]),
        (
            [RUN_FILE, "cluster.replica_count=3"],
            ["train.global_batch_size: found 8, expected a multiple of 6", "cluster.replica_count 3"],
        ),
        (
            [RUN_FILE, f"output.root_uri={RUN_FILE}/runs"],
            [f"{RUN_FILE} is not a folder", "set output.root_uri to another"],
        ),
    ],
)
def test_an_impossible_run_file_is_refused_before_anything_is_written(
    place: Path, arguments: list[str], words: list[str]
) -> None:
    refused(vlmpipe(place, "run", *arguments), ExitCode.CONFIG, *words)
    assert os.listdir(place) == [RUN_FILE]


def test_an_unwritable_output_folder_ends_with_no_permission(place: Path) -> None:
    """Nobody may make a folder in /sys, not even root, whom permission bits do not bind."""
    answer = vlmpipe(place, "run", RUN_FILE, "output.root_uri=/sys/vlmpipe")
    refused(answer, ExitCode.NO_PERMISSION, "output.root_uri is /sys/vlmpipe", "set output.root_uri to another folder")


def test_a_port_in_use_is_refused_before_data_is_prepared(place: Path) -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        answer = vlmpipe(place, "run", RUN_FILE, f"cluster.local_port={port}")
    refused(answer, ExitCode.UNAVAILABLE, f"port {port} of this machine is in use", "leave cluster.local_port at 0")
    assert os.listdir(place) == [RUN_FILE]


# Mistakes in the data


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (None, ExitCode.CONFIG, ["data.source 'data.json' does not exist", "an existing LLaVA file"]),
        ("cats, dogs", ExitCode.DATA, ["data.json is not JSON", "one JSON array of LLaVA records"]),
        (
            '[{"prompt": "What is this?", "label": "A cat."}]',
            ExitCode.DATA,
            ["data.json is not in LLaVA's format: found an object with the keys 'prompt', 'label'"],
        ),
    ],
    ids=["missing", "not JSON", "not LLaVA"],
)
def test_check_says_what_is_wrong_with_a_source(place: Path, content: str | None, code: int, words: list[str]) -> None:
    if content is not None:
        (place / "data.json").write_text(content)
    answer = vlmpipe(place, "check", RUN_FILE, "data.source=data.json")
    assert answer.code == code and "Traceback" not in answer.said
    said = answer.words.replace(" ", "")  # a long path is broken wherever the line ends
    for word in words:
        assert word.replace(" ", "") in said


def test_an_image_folder_without_images_ends_the_run_with_a_message(place: Path) -> None:
    write_json(place / "data.json", [record(number) for number in range(20)])
    (place / "images").mkdir()
    answer = vlmpipe(place, "run", RUN_FILE, "data.source=data.json", "data.image_folder=images")
    refused(answer, ExitCode.DATA, "step prepare-data failed", "data.image_folder 'images' holds no images")
    assert not list(place.glob("runs/prepared/*"))


def test_too_many_bad_samples_end_the_run_with_examples_and_nothing_prepared(place: Path) -> None:
    _, records = llava_folder(place, count=20)
    for number in range(5):
        (place / "images" / f"{number}.png").write_bytes(b"no picture")
    write_json(place / "data.json", records)
    answer = vlmpipe(place, "run", RUN_FILE, "data.source=data.json", "data.image_folder=images")
    refused(
        answer,
        ExitCode.DATA,
        "5 of 20 samples cannot be used",
        "image.unidentified (5), for example data.json record 1",
        "at most 2.0% rejected (data.max_reject_fraction)",
        "to do: correct the samples",
    )
    assert not list(place.glob("runs/prepared/*/DONE"))


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
    """Stopped, killed in part and as a whole, and damaged. `halted`, beside its folder, is a copy of the middle."""
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
    with story.attempt("newest damaged", more_steps=0):
        """To the end."""
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


@only_whole
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


@only_whole
def test_a_killed_command_saves_a_checkpoint_and_leaves_nothing(interrupted: Story) -> None:
    """The terminal's context has waited until nothing was left."""
    attempt = interrupted.attempts["command killed"]
    assert attempt.answer.code == -signal.SIGKILL
    assert attempt.newest_after > attempt.newest_before


def test_no_process_outlives_a_command_that_ends_by_itself(stories: dict[str, Story]) -> None:
    attempts = {name: attempt for story in stories.values() for name, attempt in story.attempts.items()}
    assert [name for name, attempt in attempts.items() if attempt.left] in ([], ["command killed"])


@only_whole
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


def test_after_all_faults_the_run_ends_with_every_step_done_once(interrupted: Story) -> None:
    run, answer = only_run(interrupted.folder), interrupted.attempts["newest damaged"].answer
    assert answer.code == 0, answer.said
    assert logged_steps(run) == list(range(1, NUM_STEPS + 1))
    assert read_json(run / "summary.json")["steps"] == NUM_STEPS
    assert (run / "export" / "model.safetensors").is_file() and (run / "report.html").is_file()


@only_whole
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


@only_whole
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


def test_a_loss_that_is_not_a_number_ends_training_with_the_samples_that_it_came_from(halted: Path) -> None:
    refused(
        vlmpipe(halted, "run", RUN_FILE, "train.optimizer.learning_rate=1e30", "cluster.replica_count=1"),
        ExitCode.DATA,
        "the loss of step 2 is nan; this rank's samples: digit",
        "lower train.optimizer.learning_rate",
    )


@only_whole
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


@only_whole
def test_with_room_on_the_disk_the_same_command_completes_the_run(stories: dict[str, Story]) -> None:
    story = stories["full disk"]
    assert story.attempts["room"].answer.code == 0, story.attempts["room"].answer.said
    assert story.attempts["room"].resumed_from == story.attempts["training"].newest_after
    run = only_run(story.folder.parent / "kept")
    assert logged_steps(run) == list(range(1, FEW_STEPS + 1))
