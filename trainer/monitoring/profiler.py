"""Profiles a few steps with torch.profiler: what ran, how long, and what it waited for.

Each profiled rank writes two files into the run's folder `profile`: a trace for Perfetto, chrome://tracing and
TensorBoard, and a summary, which the run report shows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.agreement import together
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.distributed.watchdog import Watchdog
from vlmpipe.trainer.errors import ConfigError, os_errors
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.outage import warned
from vlmpipe.trainer.storage.records import seal

FOLDER = "profile"
SUMMARY, TRACE = "rank-{rank}.json", "rank-{rank}.pt.trace.json.gz"  # TensorBoard's plugin looks for .pt.trace.json
PHASES = ("forward and backward", "optimizer step", "checkpoint", "validation")
TOP_OPERATIONS = 30
MAX_SPANS = 400  # of one kind in the summary; closer ones are joined
US = 1e-6

Span = tuple[float, float]


def phase(name: str) -> record_function:
    """Marks a part of a step for the profiler. Without one it takes microseconds."""
    assert name in PHASES
    return record_function(name)


class StepProfiler:
    """Profiles the steps that `train.profile` names, from the end of the step before them. Idle without it.

    Raises ConfigError when these steps lie after the run's last one.
    """

    def __init__(self, job: JobConfig, worker: ProcessContext, *, first_step: int, total_steps: int) -> None:
        self._settings, self._run_uri, self._worker = job.train.profile, job.run.run_uri, worker
        self._profile: profile | None = None
        settings = self._settings
        if settings and settings.last_step > total_steps:
            raise ConfigError(
                f"train.profile: steps {settings.start_step} to {settings.last_step} of a run of {total_steps}",
                expected="steps that the run makes",
                fix="set train.profile.start_step or train.profile.steps lower",
            )
        self._begin_after(first_step)

    def end_step(self, done: int, watchdog: Watchdog) -> None:
        """Begin or end after this step. Collective: a program's error on one rank ends all."""
        if self._settings and done == self._settings.last_step:
            with watchdog.pause():
                together(self._worker, f"writing {self._run_uri}/{FOLDER}", self._write_or_warn)
        self._begin_after(done)

    def _begin_after(self, done: int) -> None:
        settings, worker = self._settings, self._worker
        if settings is None or done != settings.start_step - 1 or worker.rank not in settings.ranks:
            return
        is_gpu = worker.device.type == "cuda"
        self._profile = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])])
        self._profile.start()

    def _write_or_warn(self) -> None:
        """A store that is away, or a full disk, costs the profile and no training."""
        with warned(f"writing the profile of rank {self._worker.rank}"), os_errors("writing a profile"):
            self._write()

    def _write(self) -> None:
        settings, made = self._settings, self._profile
        if made is None or settings is None:  # another rank, or a start that resumed inside these steps
            return
        made.stop()
        self._profile = None
        store, rank = open_storage(self._run_uri), self._worker.rank
        with tempfile.TemporaryDirectory(prefix="vlmpipe-profile-") as folder:
            trace = Path(folder, TRACE.format(rank=rank))
            with os_errors(f"writing {trace}"):
                made.export_chrome_trace(str(trace))
            store.upload(trace, f"{FOLDER}/{trace.name}")
        about = {"rank": rank, "node": self._worker.node, "device": self._worker.device.type, "trace": trace.name}
        steps = {"first_step": settings.start_step, "last_step": settings.last_step}
        store.write(f"{FOLDER}/{SUMMARY.format(rank=rank)}", seal({**about, **steps, **summary_of(made)}))


def summary_of(made: profile) -> dict[str, object]:
    """Summary of a finished profile for the report. Times are in seconds, those of spans since its beginning.

    `spans` has one line a phase, and two for what was computed and what was sent: kernels of a GPU, or operations of a
    CPU. Sums of `operations` and `collectives` are over all threads, and on a GPU over all its streams.
    """
    averages, events = made.key_averages(), [event for event in made.events() if event.time_range.end > 0]
    on_gpu = any(event.device_type == DeviceType.CUDA for event in events)
    began = min((event.time_range.start for event in events), default=0.0)
    phases: dict[str, list[Span]] = {name: [] for name in PHASES}
    sent: list[Span] = []
    computed: list[Span] = []
    for event in events:
        span = ((event.time_range.start - began) * US, (event.time_range.end - began) * US)
        if event.name in phases and event.device_type == DeviceType.CPU:
            phases[event.name].append(span)
        elif (event.device_type == DeviceType.CUDA) == on_gpu:
            if _is_sent(event.name):
                sent.append(span)
            elif not event.is_user_annotation and (on_gpu or event.name.startswith("aten::")):
                computed.append(span)
    whole_s = max((end for spans in (*phases.values(), sent, computed) for _, end in spans), default=0.0)
    lines = {**phases, "computing": computed, "communication": sent}
    # Phases stay apart: they are few.
    gaps_s = {"computing": whole_s / MAX_SPANS, "communication": whole_s / MAX_SPANS}
    joined = {name: joined_spans(spans, gap_s=gaps_s.get(name, 0.0)) for name, spans in lines.items() if spans}
    used = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    known = [
        {"name": average.key, "calls": average.count, "seconds": getattr(average, used) * US}
        for average in averages
        if not (average.is_user_annotation or _is_sent(average.key))
    ]
    collectives = [
        {
            "name": average.key,
            "calls": average.count,
            "seconds": (average.device_time_total if on_gpu else average.cpu_time_total) * US,
        }
        for average in averages
        if _is_sent(average.key)
    ]
    return {
        "seconds": whole_s,
        "on_gpu": on_gpu,
        "computing_s": covered_s(computed),
        "communication_s": covered_s(sent),
        # Communication that no computing hides.
        "exposed_communication_s": covered_s([*sent, *computed]) - covered_s(computed),
        "spans": joined,
        "operations": sorted(known, key=lambda operation: -operation["seconds"])[:TOP_OPERATIONS],
        "collectives": sorted(collectives, key=lambda collective: -collective["seconds"]),
    }


def joined_spans(spans: Iterable[Span], *, gap_s: float) -> list[Span]:
    """The spans in order, those that overlap or lie closer than `gap_s` as one."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start - joined[-1][1] <= gap_s:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def covered_s(spans: Iterable[Span]) -> float:
    """Time that at least one of the spans covers."""
    return sum(end - start for start, end in joined_spans(spans, gap_s=0.0))


def _is_sent(name: str) -> bool:
    """Return whether an event is a collective: of gloo or NCCL on the host, or a kernel of NCCL."""
    return name.startswith(("gloo:", "nccl:", "nccl"))
