"""A probe: tries one machine of a run for a few minutes, and prints what it measured beside what the plan expects.

The launcher starts it, as any job, and has compared the machine with what is bought before; in a probe's spec that only
warns, so that one probe names all that would end a job. Rank 0 measures; the others take part in the all-reduce.

    python -m vlmpipe.trainer.launch --nproc-per-node 8 -- vlmpipe.trainer.preflight.probe \\
        --config RUN/run.json --step probe
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vlmpipe.trainer.distributed.cluster_env import LAUNCHED_VARIABLE, PREFLIGHT_FILE, REPORT_VARIABLE
from vlmpipe.trainer.errors import ExitCode, UserError, leave, print_error, run_main
from vlmpipe.trainer.preflight.bucket_rate import BucketRate, measure_bucket
from vlmpipe.trainer.preflight.gpus import FoundGpus, look
from vlmpipe.trainer.preflight.probe_plan import FOLDER, ProbePlan
from vlmpipe.trainer.progress import Progress, step_progress
from vlmpipe.trainer.sizing.calibration import PROBED, Calibration, kept_name
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record, write_record
from vlmpipe.trainer.threads import start_timer

GIB = 1 << 30
MODULE = "vlmpipe.trainer.preflight.probe"


@dataclass(frozen=True)
class Row:
    """One line of the table: a quantity with its unit, planned and measured; "-" where there is none."""

    what: str
    planned: str
    measured: str


@dataclass(frozen=True)
class Measured:
    """Rates that the machine reached. None: there is nothing to measure it on."""

    gpus: FoundGpus | None
    bucket: BucketRate
    all_reduce_gbytes_per_s: float | None  # bus bandwidth
    report: dict[str, Any]  # of the node, from the launcher

    @property
    def product_tflops(self) -> float | None:
        """The slowest GPU's TFLOPS: all ranks wait for that GPU. None without a measurement."""
        rates = [gpu.tflops for gpu in (self.gpus.gpus if self.gpus else ()) if gpu.tflops]
        return min(rates, default=None)

    @property
    def missing(self) -> list[dict[str, str]]:
        """Faults that end a job with machine_check fail: found, expected and fix, of the machine and of addresses."""
        missing = (self.report.get("machine") or {}).get("missing", ())
        return [*(finding for finding in missing if finding["certain"]), *self.report.get("denied", ())]


def probe(plan: ProbePlan, run_uri: str) -> None:
    """Measure, print, and leave `<run>/probe/<step>.json` and the calibration.

    Raises UserError (78, or 77 for addresses alone) where a job on this machine would end before it begins. With
    machine_check warn none would.
    """
    with step_progress(run_uri, plan.step) as progress, _limit(plan, progress):
        gpus = look(rates=True) if plan.accelerator_count else None
        progress.update(1, 3, message="products measured")
        all_reduce = _all_reduce(run_uri)
        progress.update(2, 3, message="all-reduce measured")
        report = json.loads(os.environ.get(REPORT_VARIABLE, "{}"))
        measured = Measured(gpus, measure_bucket(run_uri, plan.bucket_mib), all_reduce, report)
        rows = table(plan, measured)
        calibration = calibration_by(plan, measured)
        if calibration:
            _keep(plan, run_uri, calibration)
        result = {
            "version": 1,
            "plan": plan.model_dump(),
            "rows": [asdict(row) for row in rows],
            "measured": {"gpus": asdict(gpus) if gpus else None, "bucket": asdict(measured.bucket)},
            "missing": measured.missing,
            "warnings": report.get("warnings", []),
            "calibration": asdict(calibration) if calibration else None,
        }
        write_record(open_storage(run_uri), f"{FOLDER}/{plan.step}.json", result, indent=1)
        print("\n".join(lines(result)), flush=True)
        if measured.missing and plan.machine_check == "fail":
            raise _would_fail(measured)
        lacks = f"{len(measured.missing)} missing, of which jobs warn" if measured.missing else "nothing is missing"
        progress.finish(message=f"{plan.machine}: {lacks}")


def table(plan: ProbePlan, measured: Measured) -> list[Row]:
    """The measurements beside the plan."""
    report, gpus, bucket = measured.report, measured.gpus, measured.bucket
    rows = []
    if gpus:
        computing = [gpu for gpu in gpus.gpus if not gpu.fault]
        memory = min((gpu.memory_bytes for gpu in gpus.gpus), default=0)
        rows += [
            Row("GPUs that compute", str(plan.accelerator_count), str(len(computing))),
            Row("memory of a GPU, GiB", _figure(plan.gpu_memory_gib), _figure(memory / GIB)),
            Row("matrix products, TFLOP/s a GPU", _figure(plan.product_tflops), _figure(measured.product_tflops)),
            Row("NVIDIA's driver", "-", gpus.driver or "not found"),
            Row("torch, its CUDA, its NCCL", "-", " ".join(filter(None, (gpus.torch, gpus.cuda, gpus.nccl))) or "none"),
        ]
    rows += [
        Row(
            "all-reduce in the machine, GB/s",
            _figure(plan.all_reduce_gbytes_per_s),
            _figure(measured.all_reduce_gbytes_per_s),
        ),
        Row("run's folder, written, GB/s", _figure(plan.write_gbytes_per_s), _figure(bucket.write_gbytes_per_s)),
        Row("run's folder, read, GB/s", "-", _figure(bucket.read_gbytes_per_s)),
        Row("free disk, GiB", "-", _figure(report.get("free_bytes", 0) / GIB)),
    ]
    if report.get("shared_memory_bytes") is not None:
        rows.append(Row("/dev/shm, GiB", "at least 1", _figure(report["shared_memory_bytes"] / GIB)))
    return rows


def lines(result: dict[str, Any]) -> list[str]:
    """A probe's result for people: what would have failed first, then the table."""
    plan, missing = result["plan"], result["missing"]
    head = f"probe of {plan['machine']}, the machine of {' and '.join(plan['jobs'])}: "
    fails = plan["machine_check"] == "fail"
    verdict = "a job would start here"
    if missing:
        lacks = f"({len(missing)} missing)" if fails else f"({len(missing)} missing, cluster.machine_check=warn)"
        verdict = f"a job would {'end' if fails else 'start'} here {lacks}"
    word = "would fail:" if fails else "missing:   "
    shown_findings = [f"  {word} {finding['found']}; to do: {finding['fix']}" for finding in missing]
    shown_findings += [f"  warning:    {text}" for text in result["warnings"] if not _is_of(text, missing)]
    rows = [Row("", "plan", "measured"), *(Row(**row) for row in result["rows"])]
    widths = [max(len(text) for text in column) for column in zip(*((r.what, r.planned) for r in rows), strict=True)]
    shown = [f"  {row.what:<{widths[0]}}  {row.planned:<{widths[1]}}  {row.measured}".rstrip() for row in rows]
    calibration = result["calibration"]
    calibrated = [f"  kept for plan.calibrate_from: {calibration['origin']}"] if calibration else []
    return [head + verdict, *shown_findings, *shown, *calibrated]


def _is_of(warning: str, missing: list[dict[str, str]]) -> bool:
    return any(warning.startswith(finding["found"]) for finding in missing)


def calibration_by(plan: ProbePlan, measured: Measured) -> Calibration | None:
    """The pace of products; None where there is nothing to compare."""
    reached = measured.product_tflops
    if not plan.run_names or not plan.product_tflops or not reached:
        return None
    pace = plan.product_tflops / reached
    return Calibration(
        pace,
        plan.accelerator_type,
        f"Steps are taken to last {pace:.2f} of their forecast, by products alone: a probe measured {reached:,.0f} "
        f"TFLOP/s on {plan.accelerator_type}, where {plan.product_tflops:,.0f} were expected (plan.calibrate_from).",
        of_steps=False,
    )


def _keep(plan: ProbePlan, run_uri: str, calibration: Calibration) -> None:
    """Write the calibration to the probe's folder, and under the root if no run has measured steps."""
    write_record(open_storage(run_uri), PROBED, asdict(calibration))
    root = open_storage(plan.root_uri)
    for run_name in plan.run_names:
        name = kept_name(run_name, plan.accelerator_type)
        if not root.stat(name) or not Calibration(**read_record(root, name)).of_steps:
            write_record(root, name, asdict(calibration))


def _all_reduce(run_uri: str) -> float | None:
    """Bus bandwidth between this machine's ranks, in GB/s; collective. None for one rank."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:  # without torch, which not every image has
        report = json.loads(os.environ.get(REPORT_VARIABLE, "{}"))
        write_record(open_storage(run_uri), PREFLIGHT_FILE, {"world_size": 1, "nodes": [report], "all_reduce": {}})
        return None
    from vlmpipe.trainer.distributed.collectives import check_ranks
    from vlmpipe.trainer.distributed.process import start_worker

    return float(check_ranks(run_uri, start_worker())["all_reduce"]["bus_gb_per_s"])


@contextlib.contextmanager
def _limit(plan: ProbePlan, progress: Progress) -> Iterator[None]:
    """End the process where it takes longer than the plan allows: a hung collective does not return.

    The launcher's time counts, because the job's own limit does not leave room for both.
    """
    launched_s = float(os.environ.get(LAUNCHED_VARIABLE) or time.monotonic())
    left_s = max(0.0, launched_s + plan.limit_s - time.monotonic())

    def end() -> None:
        error = UserError(
            f"the probe did not end within {plan.limit_s:g} s of its launcher's start: it came to "
            f"{progress.record.message or 'the products'}",
            expected="all measurements in that time",
            fix="read the log above: what comes next hangs, or is very slow",
            code=ExitCode.UNAVAILABLE,
        )
        print_error(error)
        progress.record.detail.update(exit_code=int(error.code), error=error.text())
        with contextlib.suppress(UserError):
            progress.finish("failed", error.found)
        leave(int(error.code))

    timer = start_timer(left_s, end)
    try:
        yield
    finally:
        timer.cancel()


def _would_fail(measured: Measured) -> UserError:
    first, *others = measured.missing
    also = [f"  also:     {finding['found']}; to do: {finding['fix']}" for finding in others]
    of_addresses = len(measured.missing) == len(measured.report.get("denied", ()))
    code = ExitCode.NO_PERMISSION if of_addresses else ExitCode.MACHINE
    return UserError("\n".join([first["found"], *also]), expected=first["expected"], fix=first["fix"], code=code)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """One rank."""
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__)
    parser.add_argument("--config", required=True, help="URI of the probe's run.json")
    parser.add_argument("--step", required=True, help="name of the probe's plan and record")
    options = parser.parse_args(arguments)
    run_uri = options.config.rpartition("/")[0]
    plan = ProbePlan.load(run_uri, options.step)
    if int(os.environ.get("RANK", "0")):
        _all_reduce(run_uri)
    else:
        probe(plan, run_uri)
    return int(ExitCode.OK)


if __name__ == "__main__":
    leave(run_main(main))
