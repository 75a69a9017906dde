"""Summary of a run: its results, or what failed and what to do."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from vlmpipe.records.decision import Decision
from vlmpipe.records.learning_curve import LearningCurve
from vlmpipe.records.registered import Registered
from vlmpipe.records.sweep_comparison import SweepComparison
from vlmpipe.runs.folders.fault_summary import fault_lines, read_faults, restart_lines
from vlmpipe.runs.folders.lock import is_running
from vlmpipe.runs.folders.marker import MARKER, Marker, all_markers, require_marker
from vlmpipe.runs.folders.newest_checkpoint import newest_checkpoint_step
from vlmpipe.runs.folders.next_commands import next_commands
from vlmpipe.runs.folders.run import LOG
from vlmpipe.runs.folders.stages import is_sweep, stage_folders
from vlmpipe.runs.folders.state import first_error, read_state, read_tail, results_folder
from vlmpipe.runs.folders.sweep import sweep_lines
from vlmpipe.runs.run_state import RunState, clock
from vlmpipe.trainer.config.benchmarks import TITLES
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.evaluation_notes import evaluation_notes
from vlmpipe.trainer.records.step import read_steps
from vlmpipe.trainer.storage.base import join_uri
from vlmpipe.trainer.storage.local import LocalStorage

LAST_LOG_LINES = 15
LAST_LOG_BYTES = 1 << 14
CLOSENESS = {"vqa_accuracy": "VQA accuracy: numbers and articles do not matter", "anls": "ANLS: similarity of letters"}
CONTROL_NAMES = {"shuffled_image": "with another sample's image", "no_image": "without an image"}
TO_DO = {
    ExitCode.CONFIG: "correct the run file, then run it again",
    ExitCode.DATA: "correct the data, then run the same command again",
    ExitCode.UNAVAILABLE: "make it available, then run the same command: it continues this run",
    ExitCode.CANNOT_WRITE: "free disk space, then run the same command: it continues this run",
    ExitCode.CHECKPOINT_CORRUPT: "add --fresh to start a new run",
    ExitCode.PREEMPTED: "run the same command: it continues this run",
    ExitCode.NO_PERMISSION: "correct the permissions, then run the same command: it continues this run",
}
AUDIT_PAGE = "audit/audit.html"  # of a run with evaluate.audit
SCORES = ("exact_match", "vqa_accuracy", "anls", "cider_d", "chance", "loss")  # of evaluate.json


@dataclass(frozen=True)
class RunReport:
    """A run by its files."""

    folder: Path
    marker: Marker
    state: RunState
    running: bool

    @property
    def is_over(self) -> bool:
        return not self.running

    @property
    def exit_code(self) -> int | None:
        """The run's exit code, PREEMPTED where it was killed; None while it runs."""
        if self.running:
            return None
        return int(ExitCode.PREEMPTED) if self.marker.exit_code is None else self.marker.exit_code

    @property
    def outcome(self) -> str:
        """running, done, stopped or failed."""
        return self.marker.outcome(running=self.running)

    @property
    def results_folder(self) -> Path:
        """Where the results are: of a run that an earlier stage's gate ended, that stage's folder."""
        return results_folder(self.folder, since_s=self.marker.started_s)

    @property
    def report(self) -> Path | None:
        """The run's report, an HTML page; None before it is written."""
        path = self.folder / "report.html"
        return path if path.is_file() else None

    @property
    def model(self) -> Path | None:
        """The folder of the exported model, for from_pretrained; None before it is written."""
        path = self.results_folder / "export"
        return path if path.is_dir() else None

    @property
    def evaluation(self) -> Evaluation | None:
        return Evaluation.read_if_there(LocalStorage(self.results_folder))

    @property
    def decision(self) -> Decision | None:
        return Decision.read_if_there(LocalStorage(self.results_folder))

    @property
    def registered(self) -> Registered | None:
        return Registered.read_if_there(LocalStorage(self.results_folder))

    @property
    def scores(self) -> dict[str, float]:
        """Scores on the validation questions, baselines and benchmarks among them; empty before the evaluation.

        Such as exact_match, chance, shuffled_image.exact_match and mmmu.accuracy.
        """
        evaluation = self.evaluation or Evaluation()
        figures = {name: evaluation.figure(name) for name in SCORES}
        for control, result in evaluation.controls.items():
            figures[f"{control}.exact_match"] = result.exact_match
        for name, benchmark in evaluation.benchmarks.items():
            figures |= {f"{name}.{metric}": value for metric, value in benchmark.scores.items()}
        return {name: value for name, value in figures.items() if value is not None}

    def lines(self) -> list[str]:
        """For people."""
        match self.outcome:
            case "running":
                return [f"Running: {self.folder.name}", f"  log:  {self.folder / LOG}"]
            case "done":
                return [*success(self), *notes(self)]
            case "stopped":
                return [*stopped(self), *notes(self)]
        return [*failure(self), *notes(self)]

    def as_json(self) -> dict[str, object]:
        """For programs."""
        evaluation, decision, registered = self.evaluation, self.decision, self.registered
        comparison = SweepComparison.read_if_there(LocalStorage(self.folder))
        curve = LearningCurve.read_if_there(LocalStorage(self.folder))
        return {
            "run_id": self.marker.run_id,
            "run_uri": str(self.folder),
            "outcome": self.outcome,
            "exit_code": self.marker.exit_code,
            "started_s": self.marker.started_s,
            "command": self.marker.shown_command,
            "steps": [asdict(step) for step in self.state.steps],
            "evaluation": evaluation and evaluation.as_json(),
            "decision": decision and decision.as_json(),
            "registered": registered and registered.as_json(),
            **({"comparison": comparison and comparison.content()} if is_sweep(self.folder) else {}),
            **({"curve": curve.content()} if curve else {}),
            "faults": read_faults(self.folder, since_s=self.marker.started_s) or None,
        }


def report_of(folder: Path, marker: Marker | None = None) -> RunReport:
    """The report of the run in `folder`. Raises ConfigError when there is none, DataError for a damaged record.

    `marker` replaces the folder's, which could not be written on a full disk.
    """
    marker = marker or require_marker(folder)
    read_steps(LocalStorage(folder))
    running = is_running(folder)
    state = read_state(folder, now_s=time.time(), since_s=marker.started_s)
    return RunReport(folder, marker, state if running else state.ended(marker.exit_code), running)


def find_run(root: str, name: str) -> RunReport:
    """The run of that id under `root`, or in the folder of that name. Raises UserError that names the newest runs."""
    if Path(name, MARKER).is_file():
        return report_of(Path(name))
    folder = Path(join_uri(root, "runs"))
    if not (folder / name / MARKER).is_file():
        newest = [marker.run_id for marker in all_markers(folder)][-5:]
        known = f"one of the newest: {', '.join(newest)}" if newest else f"a run, but there is none in {folder}"
        raise UserError(
            f"no run {name!r}",
            expected=known,
            fix="give its id, its folder, or its --root; for one on Vertex AI its resource name, or --project and "
            "--location",
            code=ExitCode.NOT_FOUND,
        )
    return report_of(folder / name)


def success(report: RunReport) -> list[str]:
    """The lines after a completed run: accuracy, the gate's decision, files, next commands."""
    folder, marker, results = report.folder, report.marker, report.results_folder
    lines = [f"Done in {clock(marker.ended_s - marker.started_s)}: run {folder.name}", ""]
    evaluation, decision, registered = report.evaluation, report.decision, report.registered
    lines += stage_lines(report.state, lambda stage: Decision.read_if_there(LocalStorage(stage_folders(folder)[stage])))
    sweeps = is_sweep(folder)
    if sweeps:
        store = LocalStorage(folder)
        lines += sweep_lines(SweepComparison.read_if_there(store), LearningCurve.read_if_there(store))
    else:
        lines += result_lines(evaluation, decision, registered)
    files = {"model": "export", "report": "report.html", "predictions": "predictions.jsonl", "audit": AUDIT_PAGE}
    for label, path in files.items():
        place = folder if path == "report.html" else results
        if (place / path).exists():
            lines.append(f"{label:<12} {place / path}")
    return [*lines, "", *next_commands(folder, marker, None if sweeps else decision)]


def stage_lines(state: RunState, decision_of: Callable[[str], Decision | None]) -> list[str]:
    """The answer of each stage's gate; none for a run without stages."""
    if len(state.stages) < 2:
        return []
    lines, begun = [], {step.stage for step in state.steps if step.state not in ("waiting", "skipped")}
    for stage in state.stages:
        decision = decision_of(stage) if stage in state.decided else None
        answer = "done" if stage in state.decided else "not finished" if stage in begun else "not begun"
        lines.append(f"{f'stage {stage}':<20} {decision.reason if decision else answer}")
    return [*lines, ""]


def result_lines(evaluation: Evaluation | None, decision: Decision | None, registered: Registered | None) -> list[str]:
    """Accuracy, the gate's decision and the registered version."""
    lines = evaluation_lines(evaluation)
    if decision:
        lines += ["", f"gate         {decision.reason}"]
    if registered and decision and decision.accepted:
        alias = f", {registered.alias}" if registered.alias else ""
        lines.append(f"registered   {registered.model} version {registered.version}{alias}")
    return lines


def evaluation_lines(evaluation: Evaluation | None) -> list[str]:
    """Return lines of validation accuracy with its baselines: the majority, and the model without the right image."""
    if evaluation is None:
        return ["no evaluation was written"]
    rows = [(f"validation accuracy, {evaluation.questions or 0:,} questions", evaluation.exact_match)]
    rows += [
        (label, evaluation.figure(name)) for name, label in CLOSENESS.items() if name in evaluation.model_fields_set
    ]
    caption_score = evaluation.cider_d
    rows.append(("majority baseline: always the most frequent answer", evaluation.chance))
    for control, result in evaluation.controls.items():
        some = f", {result.questions:,} questions" if result.left_out else ""
        some += f", {result.resized:,} images resized" if result.resized else ""
        rows.append((f"same model {CONTROL_NAMES.get(control, control)}{some}", result.exact_match))
    width = max(46, *(len(label) for label, _ in rows))
    lines = [f"{label:<{width}} {_percent(value)}" for label, value in rows]
    lines[1:1] = [f"  note: {note}" for note in evaluation_notes(evaluation)]
    if caption_score is not None:
        lines.append(f"{'CIDEr-D of captions, from 0 to 10':<{width}} {caption_score:6.2f}")
    if len(evaluation.slices) > 1:
        for name, measured in evaluation.slices.items():
            asked = "" if measured.questions is None else f"{measured.questions:,} questions, "
            baseline = f"  ({asked}majority baseline {_percent(measured.chance).strip()})"
            lines.append(f"  {name:<{width - 2}} {_percent(measured.exact_match)}{baseline}")
    for name, benchmark in evaluation.benchmarks.items():
        for metric, value in benchmark.scores.items():
            low, high = benchmark.intervals.get(metric) or (None, None)
            between = "" if low is None else f"  ({low:.3f} to {high:.3f})"
            asked = "" if benchmark.questions is None else f", {benchmark.questions:,} questions"
            lines.append(f"{f'{name}: {TITLES.get(metric, metric)}{asked}':<{width}} {value:8.3f}{between}")
    return lines


def _percent(value: float | None) -> str:
    return "    –" if value is None else f"{100 * value:5.1f} %"


def stopped(report: RunReport) -> list[str]:
    """The lines after Ctrl-C: the state of the run and how to resume it."""
    folder, state = report.folder, report.state
    under_way = next((step for step in state.steps if step.state in ("running", "failed", "stopped")), None)
    lines = [f"Stopped{f' in {under_way.title}' if under_way else ''}: run {folder.name}"]
    if len(state.stages) > 1 and state.decided:
        done = ", ".join(state.decided)
        lines.append(f"  done and not trained again: stage {done}; it continues in stage {state.stage}")
    checkpoint_step = newest_checkpoint_step(LocalStorage(stage_folders(folder)[state.stage]))
    if checkpoint_step is not None:
        total = f" of {state.step('train').total:.0f}" if state.step("train").total else ""
        lines.append(f"  a checkpoint at step {checkpoint_step}{total} is saved")
    elif under_way and under_way.name == "train-variants":
        lines.append(f"  {under_way.done:.0f} of {under_way.total:.0f} trainings are done")
    elif under_way and under_way.name == "train":
        lines.append("  no checkpoint was saved yet: training starts from its beginning")
    return [*lines, f"  to continue:  {shlex.join(report.marker.command)}", "  to start over: add --fresh"]


def failure(report: RunReport) -> list[str]:
    """The lines after a run that failed: the step, its error, logs and what to do."""
    folder, step, code = report.folder, report.state.failed, report.marker.exit_code or ExitCode.UNEXPECTED
    where = f"step {step.title}" if step else "the pipeline"
    lines = [f"error: {where} failed with exit code {code}: run {folder.name}"]
    message = _said(report)
    lines += [f"  {message[0]}", *message[1:]] if message else []
    if not message:
        tail = read_tail(folder / LOG, LAST_LOG_BYTES).splitlines()[-LAST_LOG_LINES:]
        lines += ["  the last lines of its log:", *(f"    {line}" for line in tail)]
    logs = [str(folder / LOG)]
    if step and step.detail.get("log"):
        logs.insert(0, str(step.detail["log"]))
    lines += [f"  log:      {log}" for log in logs]
    if not any(line.startswith("  to do:") for line in message):
        known = TO_DO.get(ExitCode(code)) if code in set(ExitCode) else None
        lines.append(f"  to do:    {known or 'read the log; the same command tries again and continues this run'}")
    return [*lines, f"  continue: {shlex.join(report.marker.command)}"]


def _said(report: RunReport) -> list[str]:
    """The failed step's error: the recorded one, else the one in the log, else its message."""
    step = report.state.failed
    recorded = str(step.detail.get("error", "")).splitlines() if step else []
    message = [step.message] if step and step.message else []
    if report.marker.exit_code == ExitCode.CANNOT_WRITE:  # a full disk also loses the last lines of log and record
        message = ["no space left while writing: not even the log could be written to its end"]
    return recorded or first_error(report.folder) or message


def notes(report: RunReport) -> list[str]:
    """Faults that the run survived: faults, restarts, a damaged checkpoint."""
    faults = read_faults(report.folder, since_s=report.marker.started_s)
    result = [f"note: {note}" for note in report.state.notes]
    result += fault_lines(faults, survived=report.outcome == "done")
    result += [f"note: {line}" for line in restart_lines(report.state)] if not faults else []
    return ["", *result] if result else []
