"""The training loop, readable from top to bottom."""

from __future__ import annotations

import gc
import math
import time

import torch
import torch.distributed as dist

from trainer.batches import BatchStream, StepBatches
from trainer.checkpoint.run import Checkpoints
from trainer.config import JobConfig
from trainer.errors import DataError, ExitCode
from trainer.garbage import collect_as_usual, collect_between_steps
from trainer.optim import rate_factor
from trainer.parts import build_parts
from trainer.preflight import require_room
from trainer.replicas import Replica
from trainer.step_report import StepReport, StepTotals
from trainer.storage import open_storage
from trainer.watchdog import Watchdog
from trainer.worker import StopRequest, Worker

COLLECT_GARBAGE_EVERY_STEPS = 200


def train(job: JobConfig, worker: Worker, stop: StopRequest) -> ExitCode:
    """Train the run to its end, or to the next stop request. Collective. Returns OK or PREEMPTED."""
    settings = job.train
    parts = build_parts(job, worker)
    require_room(job.run.run_uri, parts, worker, settings)
    store, strategy, loader = open_storage(job.run.run_uri), parts.strategy, parts.loader

    checkpoints = Checkpoints(job, store, strategy, parts.record, worker)
    resumed = checkpoints.resume()
    first_step = resumed.checkpoint.record.step if resumed else 0
    report = StepReport(job, worker, parts, first_step=first_step, damaged=resumed.passed_over if resumed else ())
    if settings.freeze_gc:
        collect_between_steps()  # on all ranks at the same step, so that none waits for another
    stream = BatchStream(
        loader,
        parts.image_source,
        micro_batch_rows=settings.micro_batch_rows,
        first_step=first_step,
        end_step=parts.total_steps,
        rank=parts.replica.index,
        world_size=parts.replica.count,
        device=worker.device,
    )
    stopping = False
    watchdog = Watchdog(job, worker)
    for data in stream:
        loss_share = strategy.forward_backward(data.batches, data.global_label_tokens)
        result = strategy.step(rate_factor(settings, data.step, parts.total_steps))
        totals = sum_over_ranks(loss_share, data, stop.requested, parts.replica, worker)
        require_finite(totals.loss, 0.0 if result.skipped else float(result.grad_norm), data)
        done = data.step + 1
        finished = done == parts.total_steps
        if parts.held_out and (finished or done % settings.validate_every_steps == 0):
            started = time.perf_counter()
            with watchdog.pause():
                report.validated(parts.held_out.loss(strategy, parts.replica, worker), time.perf_counter() - started)
        report.step(done, data, totals, result, strategy, stream.waited_s)
        watchdog.beat(done)
        stopping = totals.stop and not finished
        if stopping or finished or done % settings.checkpoint_every_steps == 0:
            started = time.perf_counter()
            report.flush()
            with watchdog.pause():
                checkpoints.save(done, data.epoch, loader.rows_consumed(done), totals.loss, stop)
            report.checkpoint_stalled(time.perf_counter() - started)
        if stopping:
            break
        if settings.freeze_gc and done % COLLECT_GARBAGE_EVERY_STEPS == 0:
            gc.collect()
    watchdog.close()
    stream.close()
    loader.close()
    collect_as_usual()
    name = checkpoints.finish("preempted" if stopping else "done")
    report.close(checkpoint=name, stopped=stopping)
    return ExitCode.PREEMPTED if stopping else ExitCode.OK


def sum_over_ranks(
    loss_share: torch.Tensor, data: StepBatches, stop: bool, replica: Replica, worker: Worker
) -> StepTotals:
    """Everything the ranks must agree on, in the one collective that the loss needs anyway."""
    counted = (data.useful_tokens, data.slot_tokens, data.images, len(data.sample_ids))
    numbers = [*(float(count) * replica.leads for count in counted), float(stop)]
    counts = torch.tensor(numbers, dtype=torch.float64, device=worker.device)
    values = torch.cat([loss_share.double().reshape(1), counts])
    if worker.world_size > 1:
        dist.all_reduce(values)
    loss, useful, slots, images, samples, stops = values.tolist()
    return StepTotals(loss, int(useful), int(slots), int(images), int(samples), stops > 0)


def require_finite(loss: float, grad_norm: float, data: StepBatches) -> None:
    """Stop on a loss or gradient that is not a number: every later step would be wasted, and a checkpoint of it too."""
    for name, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            samples = ", ".join(data.sample_ids[:8])
            raise DataError(
                f"the {name} of step {data.step + 1} is {value}; this rank's samples: {samples}",
                expected=f"a finite {name}",
                fix="lower train.optimizer.learning_rate, or look at these samples",
            )
