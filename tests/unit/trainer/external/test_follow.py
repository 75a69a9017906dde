"""Progress is read from what each trainer writes, once, and never from half a line."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from vlmpipe.trainer.external.follow import TrainingProgress

LLAMA_FACTORY = {"current_steps": 3, "total_steps": 5, "loss": 2.5, "lr": 1e-4, "epoch": 0.6, "percentage": 60.0}
SWIFT = {"loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-4, "global_step/max_steps": "3/5", "train_speed": "1s/it"}
OWN = {"step": 3, "loss": 2.5, "total_steps": 5, "learning_rate": 1e-4}
STATE = {
    "global_step": 3,
    "max_steps": 5,
    "log_history": [{"step": 3, "loss": 2.5, "learning_rate": 1e-4}, {"step": 3, "train_runtime": 1.0}],
}


def progress(folder: Path) -> TrainingProgress:
    return TrainingProgress([folder], folder / "metrics.jsonl")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trainer_log.jsonl", LLAMA_FACTORY),
        ("v0-2026/logging.jsonl", SWIFT),
        ("metrics.jsonl", OWN),
        ("checkpoint-3/trainer_state.json", STATE),
    ],
)
def test_every_form_gives_step_total_and_loss(tmp_path: Path, name: str, content: dict[str, Any]) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content) + "\n")
    found = progress(tmp_path)
    (line,) = found.read()
    assert (line["step"], line["loss"], line["learning_rate"]) == (3, 2.5, 1e-4)
    assert (found.step, found.total_steps, found.loss) == (3, 5, 2.5)
    assert found.read() == []


def test_half_a_line_waits_for_its_rest_and_what_is_no_json_is_passed_over(tmp_path: Path) -> None:
    path, found = tmp_path / "metrics.jsonl", progress(tmp_path)
    whole = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2)]
    path.write_text(f"not json\n{whole[0]}\n{whole[1][:9]}")
    assert [line["step"] for line in found.read()] == [1]
    path.write_text(f"not json\n{whole[0]}\n{whole[1]}\n")
    assert [line["step"] for line in found.read()] == [2]


@pytest.mark.parametrize(("made_before", "first"), [(0, 0), (0, 1), (4, 4), (4, 5)])
def test_tensorboards_scalars_are_steps_whether_counted_from_0_or_1(
    tmp_path: Path, made_before: int, first: int
) -> None:
    found = TrainingProgress([tmp_path], tmp_path / "metrics.jsonl", made_before)
    with contextlib.closing(EventFileWriter(str(tmp_path / "runs"))) as events:
        for step in range(first, first + 3):
            for tag, number in (("train/loss", 1 / (step + 1)), ("train/grad_norm", 2.0), ("weights/norm", 3.0)):
                event = Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=number)]))
                events.add_event(event)
            events.flush()
            (line,) = found.read()
            made = made_before + 1 + step - first
            assert line == {"step": made, "loss": pytest.approx(1 / (step + 1)), "grad_norm": 2.0}
    assert found.read() == []


def test_a_step_in_two_files_is_logged_once(tmp_path: Path) -> None:
    (tmp_path / "trainer_log.jsonl").write_text(json.dumps(LLAMA_FACTORY) + "\n")
    (tmp_path / "trainer_state.json").write_text(json.dumps(STATE))
    assert len(progress(tmp_path).read()) == 1


def test_the_last_loss_that_is_no_number_is_noted(tmp_path: Path) -> None:
    path, found = tmp_path / "metrics.jsonl", progress(tmp_path)
    path.write_text('{"step": 1, "loss": NaN}\n')
    found.read()
    assert found.not_finite == 1
    path.write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1.0}\n')
    found.read()
    assert found.not_finite == 0


def test_folders_that_are_deleted_meanwhile_are_passed_over(tmp_path: Path) -> None:
    over = threading.Event()

    def keep_only_the_newest_checkpoint() -> None:
        for step in itertools.count(1):
            (folder := tmp_path / f"checkpoint-{step}/global_step{step}").mkdir(parents=True)
            (folder.parent / "trainer_state.json").write_text(json.dumps(STATE))
            shutil.rmtree(folder.parent)
            if over.is_set():
                return

    program = threading.Thread(target=keep_only_the_newest_checkpoint)
    program.start()
    found = progress(tmp_path)
    try:
        for _ in range(300):
            found.read()
    finally:
        over.set()
        program.join()


def test_of_folders_that_outlast_a_start_only_new_files_are_read(tmp_path: Path) -> None:
    """A fresh start would else take the last one's steps for its own."""
    lasting = tmp_path / "checkpoints"
    for step in (99, 3):
        found = TrainingProgress([], tmp_path / "metrics.jsonl", lasting=[lasting])
        assert found.read() == []
        (folder := lasting / f"checkpoint-{step}").mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({**STATE, "global_step": step}))
        assert found.read(last=True) and found.step == step
