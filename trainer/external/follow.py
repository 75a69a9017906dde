"""Follows a program's progress by the files that it writes, whatever their form.

$VLMPIPE_METRICS        JSON lines of one's own: step, loss, total_steps, learning_rate, ...
trainer_log.jsonl       LLaMA-Factory
logging.jsonl           ms-swift
training.jsonl          NeMo AutoModel
trainer_state.json      transformers' Trainer, in each checkpoint and at the end
*tfevents*              TensorBoard, where its package is installed: scalars named loss, train/loss or train_loss
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from vlmpipe.trainer.external.platform_folders import SlowFolders

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

Numbers = dict[str, float]  # a logged step by vlmpipe's names, with `step` and `loss`

STATE = "trainer_state.json"
LOGS = ("trainer_log.jsonl", "logging.jsonl", "training.jsonl")
EVENTS = "*tfevents*"
STEP = ("step", "global_step", "current_steps")
TOTAL = ("total_steps", "max_steps")
NAMES = {
    "loss": "loss", "learning_rate": "learning_rate", "lr": "learning_rate", "grad_norm": "grad_norm",
    "epoch": "epoch", "tokens_per_s": "tokens_per_s", "eval_loss": "validation_loss",
}  # fmt: skip
STEP_OF_TOTAL = "global_step/max_steps"  # ms-swift: "3/5"


@dataclass
class TrainingProgress:
    """Steps that the program has reported so far."""

    folders: Sequence[Path]
    metrics: Path
    first_step: int = 0  # made before, by the checkpoint that training continues from
    step: int = 0  # the last one that was named
    total_steps: int = 0
    loss: float | None = None
    first_loss: float | None = None
    not_finite: int = 0  # step of the last logged loss, if that is no number
    interval: int = 1  # steps between two logged ones: the last logged one may be so far from the end
    # Outlast a start, and hold files of those before it, which are not read.
    lasting: Sequence[Path] = ()
    _read: dict[Path, int] = field(default_factory=dict)  # bytes of a log, and the time of a state's change
    _loaders: dict[Path, EventFileLoader | None] = field(default_factory=dict)  # of TensorBoard files
    _logged: set[int] = field(default_factory=set)
    _from_zero: set[Path] = field(default_factory=set)  # TensorBoard files that count steps from 0

    def __post_init__(self) -> None:
        self._before = {path for folder in self.lasting for path in paths_below(folder)}
        self._slow = SlowFolders(self.lasting)

    def read(self, *, last: bool = False) -> list[Numbers]:
        """Lines that came since the last call, each of a new step, by vlmpipe's names and in order.

        last: the program has ended, and all folders are read, however short ago they were.
        """
        lines: list[Numbers] = []
        without = frozenset() if last else self._slow.not_due()
        lasting = [folder for number, folder in enumerate(self.lasting) if number not in without]
        paths = [path for folder in (*self.folders, *lasting) for path in paths_below(folder, *LOGS, STATE, EVENTS)]
        paths = [path for path in paths if path not in self._before]
        for path in (self.metrics, *(path for path in paths if path.name in LOGS)):
            lines += self._new_lines(path)
        for path in (path for path in paths if path.name == STATE):
            lines += self._new_state(path)
        for path in (path for path in paths if fnmatch(path.name, EVENTS)):
            lines += self._new_scalars(path)
        by_step: dict[int, Numbers] = {}
        for line in lines:
            by_step.setdefault(int(line["step"]), line)
        new = [by_step[step] for step in sorted(by_step) if step not in self._logged]
        for line in new:
            self._note(line)
        return new

    def _note(self, line: Numbers) -> None:
        step = int(line["step"])
        if step > (last := max(self._logged, default=0)):
            self.interval = max(self.interval, step - last)
            self.loss = line["loss"]
            self.not_finite = 0 if math.isfinite(line["loss"]) else step
        self._logged.add(step)
        self.first_loss = line["loss"] if self.first_loss is None else self.first_loss

    def _new_lines(self, path: Path) -> list[Numbers]:
        """Whole lines after the place read to last."""
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        return [line for text in whole.splitlines() if (line := self._line(json_object(text)))]

    def _new_state(self, path: Path) -> list[Numbers]:
        try:
            changed = path.stat().st_mtime_ns
            if self._read.get(path) == changed:
                return []
            state = json_object(path.read_bytes())
        except OSError:
            return []
        if not state:  # half written
            return []
        self._read[path] = changed
        self._line(state)
        history = state.get("log_history")
        entries = history if isinstance(history, list) else []
        return [line for entry in entries if isinstance(entry, dict) and (line := self._line(entry))]

    def _new_scalars(self, path: Path) -> list[Numbers]:
        """TensorBoard has an event for each scalar; those of a step make a line."""
        if path not in self._loaders:
            self._loaders[path] = _event_loader(path)
        if (loader := self._loaders[path]) is None:
            return []
        from tensorboard.util.tensor_util import make_ndarray

        entries: dict[int, Numbers] = {}
        for event in loader.Load():
            for value in event.summary.value:
                name = value.tag.removeprefix("train/").removeprefix("train_").replace("eval/", "eval_")
                if name in NAMES and (number := make_ndarray(value.tensor)).size == 1:
                    entries.setdefault(event.step, {"step": event.step})[name] = float(number)
        if "loss" in entries.get(self.first_step, {}):  # it names the step that it begins, not the one that is made
            self._from_zero.add(path)
        first = int(path in self._from_zero)
        return [line for entry in entries.values() if (line := self._line(entry | {"step": entry["step"] + first}))]

    def _line(self, entry: Mapping[str, object]) -> Numbers | None:
        """The entry by vlmpipe's names; None for one without a loss. Notes its step and the total."""
        done, _, total = str(entry.get(STEP_OF_TOTAL, "")).partition("/")
        step = _first(entry, STEP) or (int(done) if done.isdigit() else None)
        whole = _first(entry, TOTAL) or (int(total) if total.isdigit() else None)
        if whole and whole > 0:  # transformers writes -1 for "as many as the epochs have"
            self.total_steps = int(whole)
        if step is None:
            return None
        self.step = max(self.step, int(step))
        values = {name: value for key, name in NAMES.items() if _is_number(value := entry.get(key))}
        return {"step": int(step), **values} if "loss" in values else None


def _event_loader(path: Path) -> EventFileLoader | None:
    """Reads a TensorBoard file's new events at each `Load()`; None where that package is not installed."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    except ImportError:
        print(f"launcher: {path.name} is not read: the package tensorboard is not installed", flush=True)
        return None
    return EventFileLoader(str(path))


def paths_below(folder: Path, *names: str) -> list[Path]:
    """Files in and below the folder, of these names or patterns if any are given, sorted.

    Unlike Path.rglob it passes over folders that the program deletes meanwhile, as it does with old checkpoints.
    """
    below = (Path(top, name) for top, _, files in os.walk(folder) for name in files)
    return sorted(path for path in below if not names or any(fnmatch(path.name, name) for name in names))


def steps_of(folder: Path) -> int:
    """The steps made according to the state in a checkpoint's folder; 0 where it names none."""
    try:
        state = json_object((folder / STATE).read_bytes())
    except OSError:
        return 0
    return int(_first(state, STEP) or 0)


def _first(entry: Mapping[str, object], names: Sequence[str]) -> float | None:
    return next((value for name in names if _is_number(value := entry.get(name))), None)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def json_object(text: bytes) -> dict[str, object]:
    """The JSON object; empty for anything else, such as a line that is still written."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
