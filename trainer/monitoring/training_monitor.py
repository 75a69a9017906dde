"""Training metrics and progress: lines of metrics, printed progress, the summary."""

from __future__ import annotations

import operator
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from vlmpipe.trainer.checkpoint.attempts import Attempts
from vlmpipe.trainer.checkpoint.mirror.background import MirrorLag
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.agreement import on_first
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.distributed.reduction_server import Reducers, connected_nodes, net_plugins, state_of
from vlmpipe.trainer.errors import print_warning
from vlmpipe.trainer.models.image_threads import num_threads
from vlmpipe.trainer.monitoring.gpu_telemetry import NOTHING, GpuFaultWatch, metrics_of, open_telemetry
from vlmpipe.trainer.monitoring.idle_watch import IdleWatch
from vlmpipe.trainer.monitoring.metrics_writer import MetricsLog
from vlmpipe.trainer.monitoring.rank_metrics import RankMetrics, StragglerWatch, gather_rank_metrics, straggler
from vlmpipe.trainer.monitoring.run_facts import RunFacts
from vlmpipe.trainer.monitoring.step_metrics import StepTotals, model_rates
from vlmpipe.trainer.monitoring.trackers import open_trackers
from vlmpipe.trainer.monitoring.usage import UsageLog, goodput
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.records.metrics import StepMetrics
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.outage import patiently, warned
from vlmpipe.trainer.strategies.base import Strategy
from vlmpipe.trainer.strategies.mixed_precision import LossScale


def _scale_metrics(scale: LossScale) -> dict[str, float]:
    """The next step's loss scale, and the steps skipped since the run began; empty without a scale."""
    return {"loss_scale": scale.value, "overflow_steps": scale.overflows} if scale.is_on else {}


def _ema_metrics(job: JobConfig) -> dict[str, float]:
    return {"ema_decay": job.train.ema_decay} if job.train.ema_decay else {}


class TrainingMonitor:
    """Counts and logs a run. Only rank 0 writes; the other ranks' calls do nothing.

    `start`: this start of the job. `notes`: what a person should know of it.
    """

    def __init__(
        self,
        job: JobConfig,
        worker: ProcessContext,
        facts: RunFacts,
        *,
        first_step: int,
        start: Attempts,
        notes: Sequence[str] = (),
    ) -> None:
        self._job, self._worker, self._facts, self._first_step = job, worker, facts, first_step
        self._last_step = first_step
        self._started = self._window_started = time.perf_counter()
        self._window: Counter[str] = Counter()  # since the last line
        self._sources = Counter[tuple[str, str]]()  # of each source losses and their terms, since the last line
        self._totals = Counter(tokens=0, label_tokens=0)
        self._graphs: int | None = None  # compiled before the last line
        self._stall_s = self._window_stall_s = 0.0
        self._mirror_lags = False
        self._rank_metrics = RankMetrics.at_start(worker.world_size)  # at the last line
        self._telemetry = open_telemetry(worker.device)
        self._gpu_faults, self._straggler_watch = GpuFaultWatch(), StragglerWatch()
        self._idle_watch = IdleWatch(job, cached=facts.features == "cached", compiles=facts.compiling.on)
        self._reducers = Reducers.of_job(os.environ)
        self._reduction: dict[str, str | int] = {}  # state in the last line
        self._first_loss: float | None = None
        self._last_loss: float | None = None
        self._last: StepTotals | None = None  # step counted
        self.stop_requested = False  # on some rank, in a counted step
        self.save_requested = False  # in a counted step, after a save that failed
        if worker.is_first:
            trackers = open_trackers(job, facts.total_steps)
            self._log = MetricsLog(job.run.run_uri, resumed_from_step=first_step, trackers=trackers, warn=self._warn)
            if lines := self._log.lines():
                self._first_loss, self._last_loss = lines[0]["loss"], lines[-1]["loss"]
            self._progress = Progress(job.run.run_uri, "train", patience_s=job.checkpoint.max_s_without_commit)
            for note in notes:
                self._warn(note)
            store = open_storage(job.run.run_uri)
            self._usage = UsageLog(store, start.attempt, first_step=first_step, since=start.fresh_from)
            if first_step:
                print(f"train: continuing after step {first_step} of {facts.total_steps}", flush=True)

    def is_due(self, done: int) -> bool:
        """Return whether a line is written after this step."""
        return done % self._job.train.log_every_steps == 0 or done in (self._first_step + 1, self._facts.total_steps)

    def count(self, steps: Sequence[StepTotals]) -> None:
        """Count steps, in their order."""
        for totals in steps:
            self._window.update(
                tokens=totals.useful_tokens,
                slots=totals.slot_tokens,
                images=totals.images,
                samples=totals.samples,
                label_tokens=totals.label_tokens,
                steps=1,
            )
            for source, (losses, terms) in totals.sources.items():
                self._sources.update({(source, "losses"): losses, (source, "terms"): terms})
            self._totals.update(tokens=totals.useful_tokens, label_tokens=totals.label_tokens)
            self._last, self._last_step, self._last_loss = totals, totals.step, totals.loss
            self.stop_requested |= totals.stop
            self.save_requested |= totals.save
            if self._first_loss is None:
                self._first_loss = totals.loss

    def step(
        self, done: int, strategy: Strategy, waited_s: float, mirror_lag: MirrorLag | None, *, validates: bool
    ) -> None:
        """Log a step when it is due or will be validated, after it and all before it were counted. Collective."""
        if self.is_due(done) or validates:
            timer, reducers = self._facts.forward_timer, self._reducers
            ranks = gather_rank_metrics(
                self._worker,
                waited_s,
                timer.seconds() if timer else 0.0,
                reducers.num_connected() if reducers else 0,
                self._telemetry.read() if self._telemetry else NOTHING,
            )
            if self._worker.is_first:
                assert self._last is not None
                self._write(self._last, strategy, ranks, mirror_lag)

    @property
    def last_step(self) -> int:
        """The newest counted step, or before the first one, the one that training continued from."""
        return self._last_step

    @property
    def last_loss(self) -> float:
        """The loss of the newest counted step, or before the first one, of the newest logged line."""
        assert self._last_loss is not None
        return self._last_loss

    def validation(self) -> Mapping[str, float] | None:
        """Validation metrics in the newest step's line; empty where it has none, None without a line. Collective."""

        def measured() -> dict[str, float] | None:
            line = self._log.line_of(self._last_step)
            return None if line is None else StepMetrics(self._last_step, line).validation()

        return on_first(self._worker, measured)

    def validated(self, losses: Mapping[str, float], seconds: float) -> None:
        """Add validation losses, by metric, to the newest step's line. Their time does not count as training time."""
        self._window_started += seconds
        if self._worker.is_first and self._log.line_of(self._last_step):
            self._log.amend(self._last_step, {**losses, "validation_s": seconds, **_ema_metrics(self._job)})

    def flush(self) -> None:
        """Write the log, so that a run that resumes from the next checkpoint finds its lines."""
        if self._worker.is_first:
            self._log.flush()
            self._note_usage()

    def saved(self, seconds: float, warnings: Sequence[str]) -> None:
        """Count time in which training waited for a checkpoint; add warnings, printed already, to the step's record."""
        self.save_requested = False
        self.note(warnings)
        self._stall_s += seconds
        self._window_stall_s += seconds

    def close(self, *, checkpoint: str, stopped: bool, best: Mapping[str, object]) -> None:
        """Write the summary, with `best`, and close the log. A store that is away is waited for, as for a COMMIT.

        Patience that ends with the last planned step has ended nothing early.
        """
        if best.get("ended_early") and self._last_step >= self._facts.total_steps:
            best = {**best, "ended_early": ""}
        if self._telemetry:
            self._telemetry.close()
        if not self._worker.is_first:
            return
        doing, limit_s = "writing metrics and summary", self._job.checkpoint.max_s_without_commit
        if stopped:  # not to be held back
            with warned(doing):
                self._store_results(checkpoint, best)
        else:
            patiently(doing, lambda: self._store_results(checkpoint, best), limit_s=limit_s)
        steps, why = f"{self._last_step} steps", ""
        if early := best.get("ended_early"):
            steps, why = f"{steps} of at most {self._facts.total_steps}", f": ended early, {early}"
        if self._last_step == self._first_step:  # an earlier attempt made the last step
            self._progress.finish("reused", f"all {steps} were made before{why}")
        elif stopped:
            self._progress.finish("stopped", f"stopped on request after step {self._last_step}; resumable")
        else:
            self._progress.update(self._last_step, self._facts.total_steps)
            self._progress.finish(message=f"loss {self._last_loss:.4f} after {steps}{why}")
            if early:
                self._log.end_early(self._last_step)
        self._log.close()  # last: W&B may take minutes, and this machine may be preempted

    def _store_results(self, checkpoint: str, best: Mapping[str, object]) -> None:
        self._log.store()
        store = open_storage(self._job.run.run_uri)
        nothing_left = self._last_step == self._first_step
        before = Summary.read_if_whole(store)  # one that is not is replaced
        if not nothing_left or before is None or before.steps != self._last_step:
            store.write(Summary.FILE, self._summary(checkpoint, best).sealed())
        elif (now := before.model_copy(update=best)) != before:  # the start before ended ahead of the last validation
            store.write(Summary.FILE, now.sealed())

    def _write(self, totals: StepTotals, strategy: Strategy, ranks: RankMetrics, mirror_lag: MirrorLag | None) -> None:
        now = time.perf_counter()
        window, seconds = self._window, now - self._window_started
        tokens_per_s = window["tokens"] / seconds
        # Of the slowest rank, for which all others wait.
        data_wait_s = max(map(operator.sub, ranks.data_wait_s, self._rank_metrics.data_wait_s))
        gpus = self._gpu_metrics(ranks)
        if totals.step > self._first_step + 1:  # nothing was made ahead of the first step
            stall_share, utilization = self._window_stall_s / seconds, gpus.get("gpu_utilization")
            for text in self._idle_watch.note(data_wait_s / seconds, stall_share, utilization):
                self._warn(text)
        self._log.write(
            totals.step,
            {
                "epoch": totals.epoch,
                "loss": totals.loss,
                **self._source_metrics(totals),
                "learning_rate": strategy.learning_rate(),
                **({} if totals.grad_norm is None else {"grad_norm": totals.grad_norm}),
                **_scale_metrics(strategy.loss_scale),
                **self._compile_metrics(totals.step),
                "tokens_per_s": tokens_per_s,
                "images_per_s": window["images"] / seconds,
                "samples_per_s": window["samples"] / seconds,
                **model_rates(self._facts, self._worker, self._job.train.compute_type, window, seconds),
                "label_tokens": window["label_tokens"],
                "rows": window["steps"] * self._job.train.global_batch_size,
                "fill": window["tokens"] / max(1, window["slots"]),
                "step_s": seconds / window["steps"],
                "data_wait_s": data_wait_s,
                "loader_threads": num_threads(),
                **self._straggler_metrics(ranks),
                **gpus,
                **self._reducer_metrics(ranks),
                "checkpoint_stall_s": self._window_stall_s,
                **self._request_metrics(ranks),
                **self._mirror_metrics(mirror_lag),
                "peak_memory_gib": max(ranks.peak_memory_gib),
                "elapsed_s": now - self._started,
                "time_s": time.time(),
            },
        )
        self._progress.update(
            totals.step,
            self._facts.total_steps,
            unit="steps",
            message=f"loss {totals.loss:.4f}, {tokens_per_s:,.0f} tokens/s",
            loss=totals.loss,
            tokens_per_s=tokens_per_s,
            epoch=totals.epoch,
        )
        self._note_usage()
        self._window = Counter()
        self._window_started, self._rank_metrics, self._window_stall_s = now, ranks, 0.0

    def _source_metrics(self, totals: StepTotals) -> dict[str, float]:
        """Mean loss of each source since the last line; empty with a single source."""
        window, self._sources = self._sources, Counter()
        terms = {source: window[source, "terms"] for source in totals.sources}
        return {f"loss/{source}": window[source, "losses"] / count for source, count in terms.items() if count}

    def _note_usage(self) -> None:
        self._usage.note(self._last_step, **self._totals, checkpoint_stall_s=self._stall_s)

    def _straggler_metrics(self, ranks: RankMetrics) -> dict[str, float]:
        metrics = straggler(self._rank_metrics.forward_s, ranks.forward_s)
        if why := self._straggler_watch.note(metrics):
            self._warn(f"{self._place(int(metrics['slowest_rank']))} is a straggler: {why}")
        return metrics

    def _gpu_metrics(self, ranks: RankMetrics) -> dict[str, float]:
        """Empty on CPUs."""
        for rank, fault in self._gpu_faults.note(ranks.gpus).items():
            self._warn(f"the GPU of {self._place(rank)} {fault}")
        return metrics_of(ranks.gpus)

    def _place(self, rank: int) -> str:
        return f"rank {rank} (node {rank // self._worker.local_world_size})"

    def _reducer_metrics(self, ranks: RankMetrics) -> dict[str, str | int]:
        """Return whether the Reduction Server is in use, and by how many nodes; empty in a job without one."""
        if not self._reducers:
            return {}
        nodes = self._worker.num_nodes
        connected = connected_nodes(ranks.num_reducers, self._worker.local_world_size)
        state = state_of(connected, nodes)
        if state == "absent" and not self._reduction:  # warn once
            self._warn(f"{self._reducers.warning(connected, nodes)}")
        self._reduction = {"reduction_server": state, "reduction_server_nodes": connected}
        return self._reduction

    def _request_metrics(self, ranks: RankMetrics) -> dict[str, float]:
        """Requests of all ranks to buckets, a step, since the last line; empty for a run that uses none."""
        class_a, class_b = ranks.requests_since(self._rank_metrics)
        if not sum(ranks.class_a) + sum(ranks.class_b):
            return {}
        steps = self._window["steps"]
        return {"class_a_requests": class_a / steps, "class_b_requests": class_b / steps}

    def _mirror_metrics(self, lag: MirrorLag | None) -> dict[str, float]:
        """Empty without a mirror."""
        if lag is None:
            return {}
        if lag.is_long and not self._mirror_lags:  # warn once, until the mirror has caught up
            self._warn(lag.warning())
        self._mirror_lags = lag.is_long
        return {"mirror_lag_steps": lag.steps, "mirror_lag_s": lag.seconds}

    def _warn(self, text: str) -> None:
        """Print the warning and add it to the step's record."""
        print_warning(text)
        self.note([text])

    def note(self, warnings: Sequence[str]) -> None:
        """Add warnings to the step's record."""
        if self._worker.is_first and warnings:
            self._progress.record.detail.setdefault("notes", []).extend(warnings)

    def _compile_metrics(self, done: int) -> dict[str, int]:
        """Number of graphs that this rank has compiled; empty without train.compile.

        Prints each increase: new input shapes make steps slow.
        """
        if not self._facts.compiling.on:
            return {}
        from vlmpipe.trainer.models.layers.compile import compiled_graphs  # torch's compiler takes seconds to import

        graphs = compiled_graphs()
        if self._graphs is not None and graphs > self._graphs:
            print(f"train: layers were compiled again by step {done}: {graphs} graphs now", flush=True)
        self._graphs = graphs
        return {"compiled_graphs": graphs}

    def _summary(self, checkpoint: str, best: Mapping[str, object]) -> Summary:
        job, worker, facts = self._job, self._worker, self._facts
        self._note_usage()
        usage = self._usage.close()
        reduction = {**self._reduction, "nccl_net_plugins": net_plugins()} if self._reduction else {}
        return Summary.model_validate(
            {
                "steps": self._last_step,
                "total_steps": facts.total_steps,
                "first_loss": self._first_loss,
                "final_loss": self._last_loss,
                "tokens": usage.tokens,
                "label_tokens": usage.label_tokens,
                "starts": usage.starts,
                "steps_made": usage.steps_made,
                "steps_repeated": usage.steps_repeated,
                "wall_s": usage.seconds,
                **_scale_metrics(facts.strategy.loss_scale),
                **_ema_metrics(job),
                "checkpoint_stall_s": usage.checkpoint_stall_s,
                "goodput": goodput(self._log.lines(), until_s=time.time()),
                "class_a_requests": int(sum(self._rank_metrics.class_a)) or None,
                "class_b_requests": int(sum(self._rank_metrics.class_b)) or None,
                "peak_memory_gib": self._rank_metrics.peak_memory_gib,
                "world_size": worker.world_size,
                "nodes": worker.num_nodes,
                **reduction,
                "strategy": job.train.strategy,
                "precision": job.train.precision,
                "compile": facts.compiling.state,
                "float8": job.train.float8,
                "resumed_from_step": self._first_step or None,
                "parameters": facts.num_parameters,
                "trainable_parameters": facts.num_trainable,
                "features": facts.features,
                "initial_weights": job.model.origins(),
                "checkpoint": checkpoint,
                **best,
                "settings": facts.record.settings,
                "versions": facts.record.versions,
            }
        )
