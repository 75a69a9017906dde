"""`plan.calibrate_from`: how long the steps of an earlier run took beside their forecast."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics

from vlmpipe.records.plan import PlannedRun
from vlmpipe.trainer.errors import ConfigError, UserError
from vlmpipe.trainer.records.metrics import FILE as METRICS_FILE
from vlmpipe.trainer.records.metrics import step_seconds
from vlmpipe.trainer.sizing.calibration import PROBED, Calibration, kept_name
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record, write_record

LATEST = "latest"  # plan.calibrate_from: what the last run of this name on these GPUs kept
FEWEST = 3  # logged steps after the first, which compiles and warms up


@functools.cache
def calibration_of(run_uri: str) -> Calibration:
    """Return the calibration by the run or the probe in this folder.

    Raises ConfigError if the run has no plan with a step time, or too few measured steps.
    """
    store = open_storage(run_uri)
    if store.stat(PROBED):
        return Calibration(**read_record(store, PROBED))
    lacking = [name for name in (PlannedRun.FILE, METRICS_FILE) if store.stat(name) is None]
    if lacking:
        raise _unusable(run_uri, f"{' and '.join(lacking)} are not there")
    plan = PlannedRun.read(store)
    if not plan.time or not plan.time.step_s:
        raise _unusable(run_uri, f"its {PlannedRun.FILE} has no time of a step")
    steps = step_seconds(store)
    if len(steps) < FEWEST:
        raise _unusable(run_uri, f"{len(steps)} logged steps after the first")
    measured_s, planned_s = statistics.median(steps), plan.time.step_s / plan.time.pace
    return Calibration(
        measured_s / planned_s,
        plan.jobs["train"][0].accelerator_type,
        f"Steps take {measured_s / planned_s:.2f} of their forecast, as in {run_uri}: {measured_s:.3g} s measured, "
        f"{planned_s:.3g} s planned (plan.calibrate_from).",
    )


def keep_calibration(run_uri: str) -> None:
    """Keep what a run measured under its root, for `latest_calibration`. Nothing of a run without measured steps."""
    root_uri, run_id, _ = run_uri.rpartition("/runs/")
    with contextlib.suppress(UserError):  # then the next plan is only less exact
        if run_id:
            calibration = calibration_of(run_uri)
            name = PlannedRun.read(open_storage(run_uri)).name
            file = kept_name(name, calibration.accelerator_type)
            write_record(open_storage(root_uri), file, dataclasses.asdict(calibration))


@functools.cache
def latest_calibration(root_uri: str, name: str, accelerator_type: str) -> Calibration:
    """Return the calibration by the last run of this name on these GPUs under `root_uri`, or else by the last probe.

    The factor is 1 without either.
    """
    store, file = open_storage(root_uri), kept_name(name, accelerator_type)
    if store.stat(file) is None:
        sentence = f"Not calibrated: under {root_uri} no run of {name} on {accelerator_type} was measured yet "
        return Calibration(1.0, "", f"{sentence}(plan.calibrate_from {LATEST}).")
    return Calibration(**read_record(store, file))


def _unusable(run_uri: str, problem: str) -> ConfigError:
    return ConfigError(
        f"plan.calibrate_from {run_uri}: {problem}",
        expected=f"the folder of a run on Vertex AI with {PlannedRun.FILE}, and at least {FEWEST} logged steps after "
        "the first",
        fix="name another run, or leave plan.calibrate_from out",
    )
