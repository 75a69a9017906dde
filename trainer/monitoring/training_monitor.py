"""Training metrics and progress: metrics lines, the printed line, the summary."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from trainer.checkpoint.commit import CommitRecord
from trainer.config.job import JobConfig
from trainer.distributed.process import ProcessContext
from trainer.distributed.reduction_server import Reducers, connected_nodes, net_plugins, state_of
from trainer.monitoring.forward_timer import ForwardTimer, straggler
from trainer.monitoring.metrics_writer import MetricsLog
from trainer.monitoring.rank_metrics import RankMetrics, gather_rank_metrics
from trainer.monitoring.step_metrics import StepTotals
from trainer.monitoring.wandb import open_wandb
from trainer.progress import Progress
from trainer.sizing.flops import model_flops_per_sequence
from trainer.sizing.gpu_peaks import TERA, peak_of
from trainer.sizing.model_shape import ModelShape
from trainer.storage import open_storage
from trainer.storage.base import Storage
from trainer.storage.records import read_record, seal
from trainer.strategies.base import Strategy
from trainer.strategies.mixed_precision import LossScale

SUMMARY = "summary.json"


def _is_of_step(store: Storage, step: int) -> bool:
    """Whether there is a summary of training up to this step."""
    return store.stat(SUMMARY) is not None and read_record(store, SUMMARY)["steps"] == step


def _of_scale(scale: LossScale) -> dict[str, float]:
    """The next step's loss scale, and the steps that were skipped since the run began; nothing without a scale."""
    return {"loss_scale": scale.value, "overflow_steps": scale.overflows} if scale.is_on else {}


def _of_average(job: JobConfig) -> dict[str, float]:
    """Its decay, where what is validated and exported is an average of the weights; else nothing."""
    return {"ema_decay": job.train.ema_decay} if job.train.ema_decay else {}


def _compiled_graphs() -> int:
    from trainer.models.layers.compile import compiled_graphs  # torch's compiler takes seconds to import

    return compiled_graphs()


def goodput(lines: Sequence[Mapping[str, Any]], *, until_s: float) -> float | None:
    """Share of the time since the first step began, restarts included, that went into steps that count.

    `lines` are those of metrics.jsonl, which hold each step once: what was computed and lost is not in them. Neither
    count the times in which training waited for data or a checkpoint. None before anything was logged.
    """
    timed = [line for line in lines if "time_s" in line]  # earlier versions wrote no time
    if not timed:
        return None
    steps = [line["step"] - before["step"] for before, line in zip([{"step": 0}, *lines], lines, strict=False)]
    windows = [line["step_s"] * count for line, count in zip(lines, steps, strict=True) if "time_s" in line]
    lost_s = sum(line["data_wait_s"] + line["checkpoint_stall_s"] for line in timed)
    return (sum(windows) - lost_s) / (until_s - (timed[0]["time_s"] - windows[0]))


class MonitoredRun(Protocol):
    """What the monitor reads of a run: trainer.setup's TrainingSetup has it."""

    @property
    def strategy(self) -> Strategy: ...
    @property
    def record(self) -> CommitRecord: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def num_trainable(self) -> int: ...
    @property
    def features(self) -> str: ...
    @property
    def shape(self) -> ModelShape: ...
    @property
    def forward_timer(self) -> ForwardTimer | None: ...


class TrainingMonitor:
    """Keeps the counts of a run. Only rank 0 writes; the other ranks' calls do nothing.

    `damaged` says what is wrong with checkpoints newer than the one that training continues from.
    """

    def __init__(
        self,
        job: JobConfig,
        worker: ProcessContext,
        parts: MonitoredRun,
        *,
        first_step: int,
        damaged: Sequence[str] = (),
    ) -> None:
        self._job, self._worker, self._parts, self._first_step = job, worker, parts, first_step
        self._last_step = first_step
        self._started = self._window_started = time.perf_counter()
        self._window = dict.fromkeys(("tokens", "slots", "images", "samples", "label_tokens", "steps"), 0)
        self._totals = {"tokens": 0, "label_tokens": 0}
        self._graphs: int | None = None  # compiled up to the last line
        self._stall_s = self._window_stall_s = 0.0
        self._validated: dict[str, float] = {}  # in the step that is counted next
        self._gauges = RankMetrics.at_start(worker.world_size)  # when the last line was written
        self._reducers = Reducers.of_job(os.environ)
        self._reduction: dict[str, str | int] = {}  # what the last line said of them
        self._first_loss: float | None = None
        self._last_loss: float | None = None
        self._last: StepTotals | None = None  # that was counted
        self.stop_requested = False  # of some rank, in a step that was counted
        if worker.is_first:
            wandb = open_wandb(job)
            mirrors = [wandb] if wandb else []
            self._log = MetricsLog(job.run.run_uri, resumed_from_step=first_step, mirrors=mirrors)
            if losses := self._log.column("loss"):
                self._first_loss, self._last_loss = losses[0], losses[-1]
            self._progress = Progress(job.run.run_uri, "train")
            for reason in damaged:
                self._note(
                    f"training continued after step {first_step}, because a newer checkpoint is damaged: {reason}"
                )
            if first_step:
                print(f"train: continuing after step {first_step} of {parts.total_steps}", flush=True)

    def is_due(self, done: int) -> bool:
        """Whether a line is written after this step."""
        return done % self._job.train.log_every_steps == 0 or done in (self._first_step + 1, self._parts.total_steps)

    def count(self, steps: Sequence[StepTotals]) -> None:
        """Count steps, in their order."""
        for totals in steps:
            counted = {
                "tokens": totals.useful_tokens,
                "slots": totals.slot_tokens,
                "images": totals.images,
                "samples": totals.samples,
                "label_tokens": totals.label_tokens,
                "steps": 1,
            }
            for name, count in counted.items():
                self._window[name] += count
                if name in self._totals:
                    self._totals[name] += count
            self._last, self._last_step, self._last_loss = totals, totals.step, totals.loss
            self.stop_requested |= totals.stop
            if self._first_loss is None:
                self._first_loss = totals.loss

    def step(self, done: int, strategy: Strategy, waited_s: float) -> None:
        """Log a step when it is due; it and all before it are counted then. Collective."""
        if self.is_due(done) or self._validated:
            timer, reducers = self._parts.forward_timer, self._reducers
            gauges = gather_rank_metrics(
                self._worker, waited_s, timer.seconds() if timer else 0.0, reducers.num_connected() if reducers else 0
            )
            if self._worker.is_first:
                assert self._last is not None
                self._write(self._last, strategy, gauges)
            self._validated = {}

    @property
    def last_loss(self) -> float:
        """Of the newest step that was counted, or before that of the newest line."""
        assert self._last_loss is not None
        return self._last_loss

    def validated(self, validation_loss: float, seconds: float) -> None:
        """Take the loss on held-out rows after the step that is counted next; its time is no part of that step's."""
        self._validated = {"validation_loss": validation_loss, "validation_s": seconds, **_of_average(self._job)}
        self._window_started += seconds

    def flush(self) -> None:
        """Write out the log: a run that resumes from the checkpoint made next must find its lines."""
        if self._worker.is_first:
            self._log.flush()

    def checkpoint_stalled(self, seconds: float) -> None:
        """Count time in which training waited for a checkpoint."""
        self._stall_s += seconds
        self._window_stall_s += seconds

    def close(self, *, checkpoint: str, stopped: bool) -> None:
        """Write the summary and close the log."""
        if not self._worker.is_first:
            return
        self._log.flush()
        store = open_storage(self._job.run.run_uri)
        nothing_left = self._last_step == self._first_step  # an earlier attempt made the last step
        if not (nothing_left and _is_of_step(store, self._last_step)):
            store.write(SUMMARY, seal(self._summary(checkpoint), allow_nan=False))
        if nothing_left:
            self._progress.finish("reused", f"all {self._last_step} steps were made before")
        elif stopped:
            self._progress.finish("stopped", f"stopped on request after step {self._last_step}; resumable")
        else:
            self._progress.update(self._last_step, self._parts.total_steps)
            self._progress.finish(message=f"loss {self._last_loss:.4f} after {self._last_step} steps")
        self._log.close()  # last: a mirror may wait minutes for its service, and this machine may be taken away

    def _utilisation(self, seconds: float) -> dict[str, float]:
        """Of the mean device: model FLOP/s since the line before, and their share of what it could do (MFU)."""
        window, parts = self._window, self._parts
        counts = {name: window[name] for name in ("samples", "images", "label_tokens")}
        if not window["samples"]:
            return {}
        flops = model_flops_per_sequence(
            parts.shape, useful_tokens=window["tokens"], **counts, cached=parts.features == "cached"
        )
        rate = flops / seconds / self._worker.world_size
        device = self._worker.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        peak = peak_of(name, self._job.train.compute_type)
        return {"model_tflops_per_s": rate / TERA, **({"mfu": rate / peak} if peak else {})}

    def _write(self, totals: StepTotals, strategy: Strategy, gauges: RankMetrics) -> None:
        now = time.perf_counter()
        window, seconds = self._window, now - self._window_started
        tokens_per_s = window["tokens"] / seconds
        self._log.write(
            totals.step,
            {
                "epoch": totals.epoch,
                "loss": totals.loss,
                **self._validated,
                "learning_rate": strategy.learning_rate(),
                **({} if totals.grad_norm is None else {"grad_norm": totals.grad_norm}),
                **_of_scale(strategy.loss_scale),
                **self._of_compiling(totals.step),
                "tokens_per_s": tokens_per_s,
                "images_per_s": window["images"] / seconds,
                "samples_per_s": window["samples"] / seconds,
                **self._utilisation(seconds),
                "label_tokens": window["label_tokens"],
                "rows": window["steps"] * self._job.train.global_batch_size,
                "fill": window["tokens"] / max(1, window["slots"]),
                "step_s": seconds / window["steps"],
                "data_wait_s": max(  # of the rank that waited longest: all others wait for it
                    now_s - then_s for now_s, then_s in zip(gauges.data_wait_s, self._gauges.data_wait_s, strict=True)
                ),
                **straggler(self._gauges.forward_s, gauges.forward_s),
                **self._of_reducers(gauges),
                "checkpoint_stall_s": self._window_stall_s,
                "peak_memory_gib": max(gauges.peak_memory_gib),
                "elapsed_s": now - self._started,
                "time_s": time.time(),
            },
        )
        self._progress.update(
            totals.step,
            self._parts.total_steps,
            unit="steps",
            message=f"loss {totals.loss:.4f}, {tokens_per_s:,.0f} tokens/s",
            loss=totals.loss,
            tokens_per_s=tokens_per_s,
            epoch=totals.epoch,
        )
        self._window = dict.fromkeys(window, 0)
        self._window_started, self._gauges, self._window_stall_s = now, gauges, 0.0

    def _of_reducers(self, gauges: RankMetrics) -> dict[str, str | int]:
        """Whether the Reduction Server is in use, and by how many nodes; nothing in a job without one."""
        if not self._reducers:
            return {}
        nodes = self._worker.num_nodes
        connected = connected_nodes(gauges.num_reducers, self._worker.local_world_size)
        state = state_of(connected, nodes)
        if state == "absent" and not self._reduction:  # said once
            self._note(f"warning: {self._reducers.warning(connected, nodes)}")
        self._reduction = {"reduction_server": state, "reduction_server_nodes": connected}
        return self._reduction

    def _note(self, text: str) -> None:
        """Say it, and keep it in the step's record."""
        print(f"train: {text}", flush=True)
        self._progress.record.detail.setdefault("notes", []).append(text)

    def _of_compiling(self, done: int) -> dict[str, int]:
        """Graphs that this rank has compiled; nothing without train.compile. More of them later are steps that took
        long, as rows or images came in numbers that had not been there before: said once for each line."""
        if not self._job.train.compile:
            return {}
        graphs = _compiled_graphs()
        if self._graphs is not None and graphs > self._graphs:
            print(f"train: layers were compiled again by step {done}: {graphs} graphs now", flush=True)
        self._graphs = graphs
        return {"compiled_graphs": graphs}

    def _summary(self, checkpoint: str) -> dict[str, Any]:
        job, worker, parts = self._job, self._worker, self._parts
        return {
            "steps": self._last_step,
            "total_steps": parts.total_steps,
            "first_loss": self._first_loss,
            "final_loss": self._last_loss,
            **self._totals,
            **_of_scale(parts.strategy.loss_scale),
            **_of_average(job),
            "wall_s": time.perf_counter() - self._started,
            "checkpoint_stall_s": self._stall_s,
            "goodput": goodput(self._log.lines(), until_s=time.time()),
            "peak_memory_gib": self._gauges.peak_memory_gib,
            "world_size": worker.world_size,
            "nodes": worker.num_nodes,
            **({**self._reduction, "nccl_net_plugins": net_plugins()} if self._reduction else {}),
            "strategy": job.train.strategy,
            "precision": job.train.precision,
            "resumed_from_step": self._first_step or None,
            "parameters": parts.num_parameters,
            "trainable_parameters": parts.num_trainable,
            "features": parts.features,
            "checkpoint": checkpoint,
            "versions": parts.record.versions,
        }
