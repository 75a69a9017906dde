"""Tables of the report: outcome, results by slice, confusion, timings and facts."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from vlmpipe.report.load import RunFiles, column, count, duration, mapping, number, percent, sequence
from vlmpipe.trainer.config.benchmarks import TITLES
from vlmpipe.trainer.evaluation.confusion_matrix import Confusion, confusion_of
from vlmpipe.trainer.evaluation.metrics import normalise
from vlmpipe.trainer.evaluation.significance.paired import share_interval, wilson
from vlmpipe.trainer.records.evaluation import Control, Evaluation
from vlmpipe.trainer.records.step import StepRecord
from vlmpipe.trainer.records.summary import Summary

MAX_CONFUSIONS = 6
CONTROL_NAMES = {
    "shuffled_image": "Shuffled image",
    "no_image": "No image",
    "all_tokens": "All image tokens",
    "uniform_tokens": "Evenly spaced image tokens",
}
STATE_SYMBOLS = {"done": "✓", "reused": "↻", "stopped": "■", "failed": "✕", "running": "…"}


def outcome(files: RunFiles) -> dict[str, str]:
    """How the run ended: `kind` (accepted, rejected, failed or unfinished), `symbol`, `title` and `reason`."""
    by_state: dict[str, list[StepRecord]] = defaultdict(list)
    for record in files.steps:
        by_state[record.state].append(record)
    if by_state["failed"]:
        first = by_state["failed"][0]
        return _outcome("failed", f"Failed in step {first.step}", first.message or "no message was recorded")
    if by_state["stopped"]:
        first = by_state["stopped"][0]
        message = _sentence(first.message or "stopped on request")
        return _outcome("unfinished", f"Stopped in step {first.step}", f"{message}. Run it again to continue.", "■")
    if files.decision is None:
        done = [record.step for record in files.steps if record.state in ("done", "reused")]
        where = f"The last finished step is {done[-1] if done else 'none'}."
        if by_state["running"]:
            where = f"The step {by_state['running'][0].step} has begun."
        return _outcome("unfinished", "Not finished", f"{where} There is no decision yet.")
    reason = files.decision.reason
    if not files.decision.accepted:
        return _outcome("rejected", "Rejected", _sentence(reason.removeprefix("Rejected: ")))
    title = "Accepted"
    if files.registered:
        title = f"Accepted and registered as {files.registered.model} version {files.registered.version}"
    return _outcome("accepted", title, _sentence(reason.removeprefix("Accepted: ")))


def _outcome(kind: str, title: str, reason: str, symbol: str = "") -> dict[str, str]:
    symbols = {"accepted": "✓", "unfinished": "…"}
    return {"kind": kind, "symbol": symbol or symbols.get(kind, "✕"), "title": title, "reason": reason}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def comparison(evaluation: Evaluation, predictions: Sequence[dict[str, object]] = ()) -> list[dict[str, object]]:
    """Return bars of exact match: the model with its 95% interval, controls, majority baseline. Empty if not evaluated.

    predictions: those of the evaluation, by whose images the interval is computed; without them questions count as
    independent.
    """
    bars = []
    share, questions = number(evaluation.exact_match), evaluation.questions
    if share is not None:
        low, high, basis = None, None, ""
        if questions and all(prediction.get("image_group") for prediction in predictions) and predictions:
            groups = [str(prediction["image_group"]) for prediction in predictions]
            right = [bool(prediction.get("correct")) for prediction in predictions]
            (low, high), basis = share_interval(groups, right), f", by {len(set(groups)):,} images"
        elif questions and 0 <= share <= 1:
            (low, high), basis = wilson(share, questions, questions), ", taking questions as independent"
        bars.append({"label": "This model", "share": share, "kind": "model", "low": low, "high": high, "basis": basis})
    notes = {"shuffled_image": "shown another sample's image", "no_image": "shown no image"}
    baselines = [
        (CONTROL_NAMES.get(name, name), control.exact_match, _control_note(notes.get(name, ""), control))
        for name, control in evaluation.controls.items()
    ]
    champion = evaluation.champion
    if champion and champion.exact_match is not None:
        note = f"version {champion.version}, on {_count(champion.questions)} of these questions"
        baselines.append(("Champion", champion.exact_match, note))
    baselines.append(
        ("Majority baseline", evaluation.chance, "always the most frequent training answer to the question")
    )
    for label, value, note in baselines:
        if number(value) is not None:
            bars.append({"label": label, "share": number(value), "kind": "control", "low": None, "note": note})
    return bars


def _control_note(what: str, control: Control) -> str:
    """Describe a control, and on how many questions it stands where these are not all."""
    parts = [what] if what else []
    if control.left_out:
        parts.append(f"on {_count(control.questions)} questions that have another")
    if control.resized:
        parts.append(f"{_count(control.resized)} of them resized to the question's own")
    return ", ".join(parts)


def _count(value: int | None) -> str:
    return "an unknown number" if value is None else f"{value:,}"


def slice_rows(evaluation: Evaluation) -> tuple[list[str], list[dict[str, object]]]:
    """Names of the control columns, and a line for each slice, the weakest first. None is not measured."""
    controls = evaluation.controls
    rows = [
        {
            "name": name,
            "questions": measured.questions,
            "share": number(measured.exact_match),
            "baseline": number(measured.chance),
            "controls": [_control_share(control, name) for control in controls.values()],
        }
        for name, measured in evaluation.slices.items()
    ]
    rows.sort(key=lambda row: (row["share"] is None, row["share"], row["name"]))
    return [CONTROL_NAMES.get(name, name) for name in controls], [{**row} for row in rows]


def _control_share(control: Control, name: str) -> float | None:
    measured = control.slices.get(name)
    return number(measured.exact_match) if measured else None


def benchmark_rows(evaluation: Evaluation) -> list[dict[str, object]]:
    """A line for each score of each benchmark, with its 95 % interval."""
    rows = list[dict[str, object]]()
    for name, scores in evaluation.benchmarks.items():
        for metric, value in scores.scores.items():
            low, high = scores.intervals.get(metric) or (None, None)
            rows.append(
                {
                    "name": name,
                    "format": scores.format,
                    "questions": scores.questions,
                    "metric": TITLES.get(metric, metric),
                    "value": number(value),
                    "low": number(low),
                    "high": number(high),
                }
            )
    return rows


def confusions(
    predictions: Sequence[dict[str, object]], shown: str | None
) -> tuple[list[tuple[str, Confusion]], list[str]]:
    """Slices with few distinct answers and their tables, and the names of those with too many.

    `shown` is the slice that the console shows, which comes first.
    """
    by_slice: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for line in predictions:
        by_slice[str(line.get("slice"))].append((str(line.get("answer")), str(line.get("prediction"))))
    tables: list[tuple[str, Confusion]] = []
    left_out = []
    for name, pairs in sorted(by_slice.items(), key=lambda item: item[0] != shown):
        confusion = confusion_of(pairs) if len(tables) < MAX_CONFUSIONS else None
        if confusion:
            tables.append((name, confusion))
        elif len({normalise(answer) for answer, _ in pairs}) > 1:
            left_out.append(name)
    return tables, left_out


def timings(steps: Sequence[StepRecord]) -> tuple[list[dict[str, object]], float]:
    """Each step on the run's time line (`start` and `width` are shares of it), and the length of the line in seconds.

    The step that writes this very report is left out: it has not ended.
    """
    steps = [record for record in steps if record.step != "notify"]
    if not steps:
        return [], 0.0
    spans = [(record.started_s, record.ended_s or record.started_s) for record in steps]
    first = min(start for start, _ in spans)
    whole = max(max(end for _, end in spans) - first, 1e-9)
    rows: list[dict[str, object]] = [
        {
            "step": record.step,
            "state": record.state,
            "symbol": STATE_SYMBOLS.get(record.state, "?"),
            "seconds": end - start if record.ended_s else None,
            "start": (start - first) / whole,
            "width": max(0.0, end - start) / whole,
            "message": record.message,
        }
        for record, (start, end) in zip(steps, spans, strict=True)
    ]
    return rows, whole


def split_table(stats: dict[str, object]) -> tuple[list[str], list[tuple[str, list[object]]]]:
    """Names of the splits, and a line for each number that is known of them."""
    by_name = sorted(mapping(stats.get("splits")).items(), reverse=True)  # train first
    splits = {name: mapping(content) for name, content in by_name}
    known = (name for content in splits.values() for name, value in content.items() if number(value) is not None)
    rows = [
        (name.replace("_", " "), [content.get(name) for content in splits.values()]) for name in dict.fromkeys(known)
    ]
    return list(splits), rows


def reused(files: RunFiles) -> list[str]:
    """Sentences on the steps that this run reused."""
    names = {"prepare-data": "Prepared data", "cache-features": "Vision features"}
    steps = []
    for record in files.steps:
        if record.state == "reused":
            what = names.get(record.step, f"The step {record.step}")
            message = f": {record.message}" if record.message else ""
            steps.append(f"{what}{message}.")
    resumed = files.summary.resumed_from_step
    if resumed:
        steps.append(f"Training continued from the checkpoint of step {resumed}.")
    return steps


def changed_settings(files: RunFiles) -> list[tuple[str, str, str]]:
    """Field, compiled value and the run's value where they differ."""
    record = next((step for step in files.steps if step.step == "resolve-run"), StepRecord("resolve-run"))
    rows = sequence(record.detail.get("changed_settings"))
    return [(str(line[0]), str(line[1]), str(line[2])) for line in rows if isinstance(line, list) and len(line) == 3]


def training_facts(files: RunFiles) -> list[tuple[str, str]]:
    """Names and values of the training's summary."""
    summary = files.summary
    speeds = [value for _, value in column(files.metrics, "tokens_per_s")]
    facts = [
        ("Optimizer steps", count(summary.steps)),
        (
            "Ended early",
            summary.ended_early
            and f"after {count(summary.steps)} of {count(summary.total_steps)} steps: {summary.ended_early}",
        ),
        ("Best validated step", _best(summary)),
        ("Starts", starts_sentence(summary)),
        ("Training loss, first and last", _pair(summary.first_loss, summary.final_loss)),
        ("Tokens", count(summary.tokens)),
        ("Label tokens", count(summary.label_tokens)),
        ("Training time", duration(summary.wall_s)),
        ("Median tokens per second", count(round(statistics.median(speeds))) if speeds else ""),
        ("Processes", _processes(summary)),
        ("Strategy and precision", " · ".join(filter(None, (summary.strategy, summary.precision)))),
        ("Compiled layers", summary.compile),
        ("8-bit floats", summary.float8),
        ("Parameters", count(summary.parameters)),
        ("Trained parameters", count(summary.trainable_parameters)),
        ("Vision features", summary.features),
        ("Initial weights", "; ".join(f"{k}: {v}" for k, v in summary.initial_weights.items())),
    ]
    waits = [("Waiting for data", _data_wait_share(files)), ("Waiting for checkpoints", _stall_share(summary))]
    facts += [(name, f"{percent(share)} of the time") for name, share in waits if share is not None]
    goodput = number(summary.goodput)
    if goodput is not None:
        facts.append(("In steps that count, restarts included", f"{percent(goodput)} of the time"))
    if peaks := summary.peak_memory_gib:
        facts.append(("Peak memory of a rank", f"{min(peaks):,.2f} to {max(peaks):,.2f} GiB"))
    return [(name, value) for name, value in facts if value]


def _best(summary: Summary) -> str:
    """The best validated step; empty without validations while training."""
    if summary.best_step is None:
        return ""
    return f"{count(summary.best_step)}, {summary.best_metric.replace('_', ' ')} {count(summary.best_value)}"


def starts_sentence(summary: Summary) -> str:
    """Number of training's starts, and repeated steps; empty where it started once."""
    starts, repeated = summary.repeated_starts(), summary.steps_repeated
    if not starts:
        return ""
    again = f"; at least {count(repeated)} steps made twice" if repeated else ""
    return f"{count(starts)}, whose tokens and times are summed{again}"


def train_seconds(files: RunFiles) -> float | None:
    """Return the seconds of the train step, earlier starts included; None if it has not ended."""
    record = next((record for record in files.steps if record.step == "train"), None)
    if record is None or not record.started_s or not record.ended_s:
        return None
    return max(record.ended_s - record.started_s, files.summary.wall_s or 0.0)


def _data_wait_share(files: RunFiles) -> float | None:
    """Share of the logged time spent waiting for data. `step_s` is the mean of the steps since the line before."""
    steps = [step for step, _ in column(files.metrics, "step")]
    before = dict(zip(steps[1:], steps, strict=False))
    whole = sum((step - before.get(step, step - 1)) * seconds for step, seconds in column(files.metrics, "step_s"))
    return sum(value for _, value in column(files.metrics, "data_wait_s")) / whole if whole else None


def _stall_share(summary: Summary) -> float | None:
    stalled, whole = summary.checkpoint_stall_s, summary.wall_s
    return stalled / whole if stalled is not None and whole else None


def _processes(summary: Summary) -> str:
    if summary.world_size is None:
        return ""
    nodes = summary.nodes or "?"
    return f"{summary.world_size} on {nodes} {'node' if nodes == 1 else 'nodes'}"


def _pair(first: object, second: object) -> str:
    return "" if number(first) is None or number(second) is None else f"{count(first)} → {count(second)}"
