"""The run report: one self-contained HTML page that a person can open, print and send on.

A content security policy in the page forbids requests and every script but its own, which lists the predictions.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.metadata
import platform
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from markupsafe import Markup

from vlmpipe.records.stage_folders import earlier_stages
from vlmpipe.report import tables
from vlmpipe.report.dataset_section import data_view
from vlmpipe.report.field_slices import field_rows
from vlmpipe.report.load import RunFiles, column, flatten, number, read_run
from vlmpipe.report.near_duplicates import near_duplicate_view, recorded_pairs
from vlmpipe.report.pages import STYLE, page_template
from vlmpipe.report.plan_section import plan_view
from vlmpipe.report.profile_section import profile_view
from vlmpipe.report.relevance_section import relevance_view
from vlmpipe.report.samples import PreparedImages, choose, prediction_browser, sample_cards
from vlmpipe.report.stages import stage_view, stages_outcome
from vlmpipe.report.start_section import start_notes, start_rows
from vlmpipe.report.svg_charts import SMOOTH_FROM, compact, line_chart
from vlmpipe.trainer.records.evaluation_notes import evaluation_notes
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import join_uri

SHOWN_SAMPLES = 16
SCRIPT = Path(__file__).with_name("predictions.js").read_text(encoding="utf-8")
# Title, unit and whether the axis starts at zero.
CHARTS = {
    "loss": ("Loss", "nats a label token", False),
    "validation_loss": ("Validation loss while training", "nats a label token", False),
    "tokens_per_s": ("Throughput", "tokens per second", True),
    "mfu": ("Model FLOPs utilisation", "share of the GPUs' peak", True),
    "learning_rate": ("Learning rate", "as applied at the step", True),
    "grad_norm": ("Gradient norm", "norm before clipping", True),
}
NOISY = ("loss", "tokens_per_s", "grad_norm")
PACKAGES = ("torch", "transformers", "deepspeed", "pyarrow", "pillow", "kfp")


def build_report(run_uri: str) -> str:
    """The report of the run in `run_uri`, finished or not, as HTML. Raises UserError when there is no run."""
    files = read_run(run_uri)
    stages = {name: read_run(uri) for name, uri in earlier_stages(run_uri).items()}
    return page_template("vlmpipe.report.build", "template.html.j2").render(_context(files, stages))


def write_report(run_uri: str) -> str:
    """Write `report.html` into the run's folder, and into those of the stages before the last; returns its address."""
    store = open_storage(run_uri)
    for stage_uri in earlier_stages(run_uri).values():
        write_report(stage_uri)
    store.write("report.html", build_report(run_uri).encode())
    return store.uri("report.html")


def _context(files: RunFiles, stages: dict[str, RunFiles]) -> dict[str, object]:
    controls, slices = tables.slice_rows(files.evaluation)
    shown_slice = files.evaluation.confusion.shown if files.evaluation.confusion else None
    confusions, not_confused = tables.confusions(files.predictions, shown_slice)
    splits, split_rows = tables.split_table(files.stats)
    timings, whole_s = tables.timings(files.steps)
    shows_images = files.predictions or recorded_pairs(files)
    images = PreparedImages(files.prepared.prepared_uri if files.prepared else files.run_uri) if shows_images else None
    return {
        "files": files,
        # Our own files; everything else is escaped.
        "style": Markup(STYLE),
        "script": Markup(SCRIPT),
        "script_hash": base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode(),
        "smooth_from": SMOOTH_FROM,
        "name": files.config.get("name", "run"),
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "outcome": stages_outcome(*list(stages.items())[-1]) if stages and not files.config else tables.outcome(files),
        "stages": [stage_view(name, entry, _charts(entry)) for name, entry in (stages | {"": files}).items()]
        if stages
        else [],
        "reached": _reached(files),
        "comparison": tables.comparison(files.evaluation, files.predictions),
        "notes": [f"{note[0].upper()}{note[1:]}." for note in evaluation_notes(files.evaluation)],
        "controls": controls,
        "slices": slices,
        "field_rows": field_rows(files.evaluation, files.predictions, images),
        "start_rows": start_rows(files.evaluation),
        "start_notes": start_notes(files.evaluation),
        "benchmarks": tables.benchmark_rows(files.evaluation),
        "confusions": confusions,
        "not_confused": not_confused,
        "charts": _charts(files),
        "profiles": profile_view(files.profiles),
        "training_facts": tables.training_facts(files),
        "cards": sample_cards(images, choose(files.predictions, SHOWN_SAMPLES)) if images else [],
        "predictions": prediction_browser(images, files.predictions) if images and files.predictions else None,
        "tensorboard": f"tensorboard --logdir {shlex.quote(join_uri(files.run_uri, 'logs'))}",
        "relevance": relevance_view(files, images),
        "num_wrong": sum(not line.get("correct") for line in files.predictions),
        "timings": timings,
        "whole_s": whole_s,
        "reused": tables.reused(files),
        "plan": plan_view(files),
        "splits": splits,
        "split_rows": split_rows,
        "data": data_view(files),
        "near_duplicates": near_duplicate_view(files, images),
        "config": _config(files.config),
        "changed": tables.changed_settings(files),
        "versions": _versions(files.summary),
    }


def _reached(files: RunFiles) -> set[str]:
    """Result sections to show: all, or those with content of a run that failed or did not come to its last stage."""
    content = {
        "decision": files.decision,
        "training": files.metrics or files.summary.model_fields_set,
        "slices": files.evaluation.model_fields_set,
        "samples": files.predictions,
    }
    is_cut_short = tables.outcome(files)["kind"] == "failed" or not files.config
    return {name for name, value in content.items() if value or not is_cut_short}


def _config(config: dict[str, object]) -> dict[str, list[tuple[str, object]]]:
    """Dotted names and values by section; single values and empty sections together come first."""
    sections = {name: flatten(content) for name, content in config.items() if isinstance(content, dict) and content}
    single = [(name, content) for name, content in config.items() if name not in sections]
    return {"general": single, **sections} if single else sections


def _charts(files: RunFiles) -> list[dict[str, object]]:
    """Charts over optimizer steps of the metrics that were logged."""
    resumed, validation = files.summary.resumed_from_step, number(files.evaluation.loss)
    evaluated = None if validation is None else (validation, f"evaluation loss {validation:.3g}")
    charts = list[dict[str, object]]()
    for name, (title, unit, from_zero) in _charted(files.metrics).items():
        points = column(files.metrics, name)
        if not points:
            continue
        (first, start), (last, end) = points[0], points[-1]
        ends = f"from {compact(start)} at step {compact(first)} to {compact(end)} at step {compact(last)}"
        svg = line_chart(
            points,
            label=f"{title}, {unit}, {ends}",
            x_label="step",
            from_zero=from_zero,
            smoothed=name.partition("/")[0] in NOISY and len(points) >= SMOOTH_FROM,
            reference=evaluated if name == "loss" else None,
            marks=[(resumed, f"continued from step {int(resumed)}")] if resumed and first <= resumed <= last else [],
        )
        broken = sum(name in line for line in files.metrics) - len(points)
        note = f"{broken} logged steps have no finite value." if broken else ""
        charts.append({"metric": name, "title": title, "unit": unit, "svg": svg, "note": note})
    return charts


def _charted(metrics: Sequence[Mapping[str, object]]) -> dict[str, tuple[str, str, bool]]:
    """`CHARTS`, each followed by those of its metric by source, such as loss/captions."""
    named = dict.fromkeys(name for line in metrics for name in line)
    charts = {}
    for metric, (title, unit, from_zero) in CHARTS.items():
        charts[metric] = (title, unit, from_zero)
        for name in named:
            kind, _, source = name.partition("/")
            if source and kind == metric:
                charts[name] = (f"{title}: {source}", unit, from_zero)
    return charts


def _versions(summary: Summary) -> list[tuple[str, str]]:
    """Versions that training recorded, else those of the machine that writes the report."""
    if summary.versions:
        return list(summary.versions.items())
    versions = [("python", platform.python_version()), ("system", platform.platform())]
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # the pipeline's image holds no torch
            versions.append((name, importlib.metadata.version(name)))
    return versions
