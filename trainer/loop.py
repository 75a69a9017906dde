"""The training loop, readable from top to bottom."""

from __future__ import annotations

import contextlib
import gc
import time

from vlmpipe.trainer.checkpoint.manager import Checkpoints
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.dataloading.prefetching_loader import PrefetchingLoader
from vlmpipe.trainer.distributed.agreement import agree
from vlmpipe.trainer.distributed.process import ProcessContext, StopRequest
from vlmpipe.trainer.distributed.watchdog import Watchdog
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.evaluation.best_step import BestStep
from vlmpipe.trainer.gc_control import collect_as_usual, collect_between_steps
from vlmpipe.trainer.monitoring.profiler import StepProfiler, phase
from vlmpipe.trainer.monitoring.step_metrics import AsyncStepMetrics, MetricsQueue
from vlmpipe.trainer.monitoring.training_monitor import TrainingMonitor
from vlmpipe.trainer.optimizer.build import rate_factor
from vlmpipe.trainer.preflight.room import require_room
from vlmpipe.trainer.setup.training import TrainingSetup, build_training
from vlmpipe.trainer.storage import open_storage

COLLECT_GARBAGE_EVERY_STEPS = 200


def train(job: JobConfig, worker: ProcessContext, stop: StopRequest) -> ExitCode:
    """Train the run to its end or the next stop request. Collective. Returns OK or PREEMPTED."""
    settings = job.train
    setup = build_training(job, worker)
    require_room(job.run.run_uri, setup.facts.num_trainable, worker, settings)
    store, strategy, loader = open_storage(job.run.run_uri), setup.strategy, setup.loader
    total_steps = setup.facts.total_steps

    checkpoints = Checkpoints(job, store, strategy, setup.record, worker)
    resumed = checkpoints.resume()
    first_step = resumed.checkpoint.record.step if resumed else 0
    best = BestStep(job, setup.validation, resumed, checkpoints.is_committed)
    start, notes = checkpoints.start, [*checkpoints.notes(resumed), *best.notes]
    report = TrainingMonitor(job, worker, setup.facts, first_step=first_step, start=start, notes=notes)
    collect_between_steps()  # on all ranks in the same step, so that none waits for another
    profiler = StepProfiler(job, worker, first_step=first_step, total_steps=total_steps)
    every = settings.validate_every_steps  # with a split to validate on: `build_training` refuses others
    unread, stopping = MetricsQueue(worker), False
    # Closed at any end: a rank that fails while others hang would be reported as stalled while it unwinds.
    with checkpoints.finished_before_errors(), contextlib.closing(Watchdog(job, worker)) as watchdog:

        def save(done: int, epoch: int) -> None:
            started = time.perf_counter()
            report.count(unread.rest())
            report.flush()
            with watchdog.pause(), phase("checkpoint"):
                consumed = loader.sampler.batch(done).sequences_consumed
                checkpoints.save(done, epoch, consumed, report.last_loss, stop, best.state)
            best.committed(checkpoints.committed)  # the save before this one
            report.saved(time.perf_counter() - started, checkpoints.take_warnings())

        if every and first_step and first_step % every == 0:  # an earlier start may have ended before this validation
            with watchdog.pause():
                _validate(setup, report, worker, best)
        stream = PrefetchingLoader(
            loader,
            setup.image_source,
            micro_batch_size=settings.micro_batch_size,
            first_step=first_step,
            end_step=first_step if best.ends_training else total_steps,
            replica=setup.replica,
            device=worker.device,
            sources=setup.source_losses.names if setup.source_losses else (),
        )
        for data in stream:
            with phase("forward and backward"):
                loss_share = strategy.forward_backward(data.batches, data.global_loss_terms)
            with phase("optimizer step"):
                result = strategy.step(rate_factor(settings, data.step, total_steps))
            done = data.step + 1
            finished = done == total_steps
            validates = every > 0 and done % every == 0 and not finished
            saves = finished or done % settings.checkpoint_every_steps == 0
            pending = AsyncStepMetrics(
                loss_share,
                result,
                data,
                stop=stop.requested,
                save=checkpoints.wants_again,
                replica=setup.replica,
                worker=worker,
                sources=setup.source_losses,
            )
            report.count(unread.add(pending, read_all=validates or saves or report.is_due(done)))
            report.step(done, strategy, stream.waited_s, checkpoints.mirror_lag(done), validates=validates)
            watchdog.beat(done)
            stopping = report.stop_requested and not finished
            if saves := stopping or saves or report.save_requested:
                save(done, data.epoch)
            if stopping:
                break
            if validates:
                with watchdog.pause():
                    _validate(setup, report, worker, best)
                if not saves and (best.ends_training or best.is_worth_saving(done)):
                    save(done, data.epoch)
                if best.ends_training:
                    break
            profiler.end_step(done, watchdog)
            if done % COLLECT_GARBAGE_EVERY_STEPS == 0:
                gc.collect()
    stream.close()
    loader.close()
    collect_as_usual()
    stopping = stopping or not checkpoints.settle(stop)
    if not stopping:  # the last one, once all steps are saved
        _validate(setup, report, worker, best)
    name = checkpoints.finish("preempted" if stopping else "done")
    best.committed(checkpoints.committed)
    report.note(checkpoints.take_warnings())
    report.close(checkpoint=name, stopped=stopping, best=best.summary())
    return ExitCode.PREEMPTED if stopping else ExitCode.OK


def _validate(setup: TrainingSetup, report: TrainingMonitor, worker: ProcessContext, best: BestStep) -> None:
    """Add validation losses to the newest step's metrics, unless they are there, and count them. Collective.

    Comes after the step's save, so that a validation that fails loses no step; the next start makes up for it. The last
    one waits for the COMMIT. One halfway waits for it only where it fails, and one that is killed then may lose it.
    """
    if not setup.validation:
        return
    losses = report.validation()
    if losses is None and not report.last_step:  # no step was made
        return
    if losses is None or best.lacks(losses):
        started = time.perf_counter()
        with phase("validation"):
            losses = agree(setup.validation.losses(setup.strategy, worker))  # rounded as on rank 0, by which all decide
        report.validated(losses, time.perf_counter() - started)
    best.count(report.last_step, losses)
