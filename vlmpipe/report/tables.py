"""Tables of the report: outcome, results by slice, confusion, timings and facts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.evaluation.confusion_matrix import confusion_of
from trainer.evaluation.metrics import normalise
from vlmpipe.report.format import count, duration, percent
from vlmpipe.report.load import RunFiles, column, number

MOST_CONFUSIONS = 6
CONTROL_NAMES = {"shuffled_image": "Shuffled image", "no_image": "No image"}
STATE_SYMBOLS = {"done": "✓", "reused": "↻", "stopped": "■", "failed": "✕", "running": "…"}


@dataclass(frozen=True)
class Outcome:
    """How the run ended: `kind` is accepted, rejected, failed or unfinished."""

    kind: str
    symbol: str
    title: str
    reason: str


@dataclass(frozen=True)
class Bar:
    """A labelled share; `low` and `high` bound its 95% interval where there is one."""

    label: str
    share: float
    kind: str
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class SliceRow:
    """Results of one slice; None is not measured."""

    name: str
    questions: int | None
    share: float | None
    chance: float | None
    controls: tuple[float | None, ...]


@dataclass(frozen=True)
class ConfusionTable:
    """What is mixed up in one slice; `totals[i]` questions in each line."""

    slice: str
    answers: tuple[str, ...]
    columns: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    totals: tuple[int, ...]


@dataclass(frozen=True)
class Timing:
    """One step on the run's time line; `start` and `width` are shares of it."""

    step: str
    state: str
    symbol: str
    seconds: float | None
    start: float
    width: float
    message: str


def outcome(files: RunFiles) -> Outcome:
    """The run's end in a title and one sentence."""
    failed = [record for record in files.steps if record.get("state") == "failed"]
    if failed:
        message = failed[0].get("message") or "no message was recorded"
        return Outcome("failed", "✕", f"Failed in step {failed[0]['step']}", message)
    stopped = [record for record in files.steps if record.get("state") == "stopped"]
    if stopped:
        message = _sentence(stopped[0].get("message") or "stopped on request")
        title = f"Stopped in step {stopped[0]['step']}"
        return Outcome("unfinished", "■", title, f"{message}. Run it again to continue.")
    if "accepted" not in files.decision:
        running = [record["step"] for record in files.steps if record.get("state") == "running"]
        done = [record["step"] for record in files.steps if record.get("state") in ("done", "reused")]
        last = done[-1] if done else "none"
        where = f"The step {running[0]} has begun." if running else f"The last finished step is {last}."
        return Outcome("unfinished", "…", "Not finished", f"{where} There is no decision yet.")
    reason = str(files.decision.get("reason", ""))
    if not files.decision["accepted"]:
        return Outcome("rejected", "✕", "Rejected", _sentence(reason.removeprefix("Rejected: ")))
    title = "Accepted"
    if files.registered:
        title = f"Accepted and registered as {files.registered.get('model')} version {files.registered.get('version')}"
    return Outcome("accepted", "✓", title, _sentence(reason.removeprefix("Accepted: ")))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def wilson(share: float, questions: int) -> tuple[float, float]:
    """95% interval of a share of `questions` independent questions (Wilson, 1927)."""
    z2 = 1.96**2
    middle = (share + z2 / (2 * questions)) / (1 + z2 / questions)
    half = math.sqrt(z2 * (share * (1 - share) / questions + z2 / (4 * questions**2))) / (1 + z2 / questions)
    return max(0.0, middle - half), min(1.0, middle + half)


def comparison(evaluation: dict[str, Any]) -> list[Bar]:
    """The model's exact match beside chance and the controls; empty without an evaluation."""
    bars = []
    share, questions = number(evaluation.get("exact_match")), number(evaluation.get("questions"))
    if share is not None:
        low, high = wilson(share, int(questions)) if questions else (None, None)
        bars.append(Bar("This model", share, "model", low, high))
    notes = {"shuffled_image": "shown another sample's picture", "no_image": "shown no picture"}
    for name, control in (evaluation.get("controls") or {}).items():
        value = number(control.get("exact_match"))
        if value is not None:
            bars.append(Bar(CONTROL_NAMES.get(name, name), value, "control", note=notes.get(name, "")))
    chance = number(evaluation.get("chance"))
    if chance is not None:
        bars.append(Bar("Chance", chance, "control", note="always the commonest training answer"))
    return bars


def slice_rows(evaluation: dict[str, Any]) -> tuple[list[str], list[SliceRow]]:
    """Names of the control columns, and a line for each slice, the weakest first."""
    controls: dict[str, Any] = evaluation.get("controls") or {}
    rows = []
    for name, measured in (evaluation.get("slices") or {}).items():
        baselines = tuple(_control_share(control, name) for control in controls.values())
        rows.append(
            SliceRow(
                name,
                measured.get("questions"),
                number(measured.get("exact_match")),
                number(measured.get("chance")),
                baselines,
            )
        )
    rows.sort(key=lambda row: (row.share is None, row.share, row.name))
    return [CONTROL_NAMES.get(name, name) for name in controls], rows


def _control_share(control: dict[str, Any], name: str) -> float | None:
    """A control's slice is recorded as a share, or as an object that holds it."""
    value = (control.get("slices") or {}).get(name)
    return number(value.get("exact_match") if isinstance(value, dict) else value)


def confusions(predictions: Sequence[dict[str, Any]], shown: str | None) -> tuple[list[ConfusionTable], list[str]]:
    """A table for each slice with few distinct answers, and the names of the slices that have too many.

    `shown` is the slice that the console shows, which comes first.
    """
    by_slice: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for line in predictions:
        by_slice[str(line.get("slice"))].append((str(line.get("answer")), str(line.get("prediction"))))
    tables: list[ConfusionTable] = []
    left_out = []
    for name, pairs in sorted(by_slice.items(), key=lambda item: item[0] != shown):
        found = confusion_of(pairs) if len(tables) < MOST_CONFUSIONS else None
        if found:
            totals = tuple(sum(line) for line in found.counts)
            tables.append(ConfusionTable(name, found.answers, found.columns, found.counts, totals))
        elif len({normalise(answer) for answer, _ in pairs}) > 1:
            left_out.append(name)
    return tables, left_out


def timings(steps: Sequence[dict[str, Any]]) -> tuple[list[Timing], float]:
    """Each step's place on the time line, and the seconds from the first start to the last end.

    The step that writes this very report is left out: it has not ended.
    """
    steps = [record for record in steps if record["step"] != "notify"]
    starts = [record.get("started_s", 0.0) for record in steps]
    ends = [record.get("ended_s") or record.get("started_s", 0.0) for record in steps]
    if not steps:
        return [], 0.0
    first, whole = min(starts), max(max(ends) - min(starts), 1e-9)
    rows = []
    for record, start, end in zip(steps, starts, ends, strict=True):
        state = str(record.get("state"))
        rows.append(
            Timing(
                step=record["step"],
                state=state,
                symbol=STATE_SYMBOLS.get(state, "?"),
                seconds=end - start if record.get("ended_s") else None,
                start=(start - first) / whole,
                width=max(0.0, end - start) / whole,
                message=str(record.get("message") or ""),
            )
        )
    return rows, whole


def split_table(stats: dict[str, Any]) -> tuple[list[str], list[tuple[str, list[Any]]]]:
    """Names of the splits, and a line for each number that is known of them."""
    splits: dict[str, dict[str, Any]] = dict(sorted((stats.get("splits") or {}).items(), reverse=True))  # train first
    known = (name for content in splits.values() for name, value in content.items() if number(value) is not None)
    rows = [
        (name.replace("_", " "), [content.get(name) for content in splits.values()]) for name in dict.fromkeys(known)
    ]
    return list(splits), rows


def reused(files: RunFiles) -> list[str]:
    """What this run did not have to do again, in sentences."""
    names = {"prepare-data": "Prepared data", "cache-features": "Vision features"}
    found = []
    for record in files.steps:
        if record.get("state") == "reused":
            what = names.get(record["step"], f"The step {record['step']}")
            message = f": {record['message']}" if record.get("message") else ""
            found.append(f"{what}{message}.")
    resumed = files.summary.get("resumed_from_step")
    if resumed:
        found.append(f"Training continued from the checkpoint of step {resumed}.")
    return found


def training_facts(files: RunFiles) -> list[tuple[str, str]]:
    """Names and values of the training's summary."""
    summary = files.summary
    speeds = sorted(value for _, value in column(files.metrics, "tokens_per_s"))
    facts = [
        ("Optimizer steps", count(summary.get("steps"))),
        ("Training loss, first and last", _pair(summary.get("first_loss"), summary.get("final_loss"))),
        ("Tokens", count(summary.get("tokens"))),
        ("Label tokens", count(summary.get("label_tokens"))),
        ("Training time", duration(summary.get("wall_s"))),
        ("Median tokens per second", count(round(speeds[len(speeds) // 2])) if speeds else ""),
        ("Processes", _processes(summary)),
        ("Strategy and precision", " · ".join(str(summary[k]) for k in ("strategy", "precision") if k in summary)),
        ("Parameters", count(summary.get("parameters"))),
        ("Trained parameters", count(summary.get("trainable_parameters"))),
        ("Vision features", str(summary.get("features", ""))),
    ]
    waits = [("Waiting for data", _data_wait_share(files)), ("Waiting for checkpoints", _stall_share(summary))]
    facts += [(name, f"{percent(share)} of the time") for name, share in waits if share is not None]
    goodput = number(summary.get("goodput"))
    if goodput is not None:
        facts.append(("In steps that count, restarts included", f"{percent(goodput)} of the time"))
    peaks = summary.get("peak_memory_gib")
    if isinstance(peaks, list) and all(number(peak) is not None for peak in peaks) and peaks:
        facts.append(("Peak memory of a rank", f"{min(peaks):,.2f} to {max(peaks):,.2f} GiB"))
    return [(name, value) for name, value in facts if value]


def _data_wait_share(files: RunFiles) -> float | None:
    """Share of the logged time spent waiting for data. `step_s` is the mean of the steps since the line before."""
    steps = [step for step, _ in column(files.metrics, "step")]
    before = dict(zip(steps[1:], steps, strict=False))
    whole = sum((step - before.get(step, step - 1)) * seconds for step, seconds in column(files.metrics, "step_s"))
    return sum(value for _, value in column(files.metrics, "data_wait_s")) / whole if whole else None


def _stall_share(summary: dict[str, Any]) -> float | None:
    stalled, whole = number(summary.get("checkpoint_stall_s")), number(summary.get("wall_s"))
    return stalled / whole if stalled is not None and whole else None


def _processes(summary: dict[str, Any]) -> str:
    if "world_size" not in summary:
        return ""
    nodes = summary.get("nodes", "?")
    return f"{summary['world_size']} on {nodes} {'node' if nodes == 1 else 'nodes'}"


def _pair(first: Any, second: Any) -> str:
    return "" if number(first) is None or number(second) is None else f"{count(first)} → {count(second)}"
