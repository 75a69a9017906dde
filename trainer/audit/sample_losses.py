"""Losses of a run's samples under two of its checkpoints, computed by all ranks of a job or by one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from vlmpipe.trainer.audit.checkpoints import MIN_GAP, LossModel, checkpoints_of, early_and_late, opened_model
from vlmpipe.trainer.audit.losses import AnswerLosses, answer_losses, joined
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.shards.index import SplitIndex
from vlmpipe.trainer.distributed.agreement import gather
from vlmpipe.trainer.distributed.process import ProcessContext

NEEDS_RUN = "needs the checkpoints of a run: name a run in place of the run file"
IN_PAIRS = "a run that trains on pairs has no loss of a single answer"
NO_CHECKPOINT = "the run has no whole checkpoint"

Told = Callable[[str, int, int], None]  # what is done, how much of it, and all


@dataclass(frozen=True)
class LossPass:
    """Losses of the chosen samples under one checkpoint, by split in the order of SPLITS."""

    step: int
    is_blank: bool  # without what is in the images
    splits: tuple[AnswerLosses, ...]


@dataclass(frozen=True)
class RunLosses:
    """missing: why there are no losses; empty where there are. alone: why one checkpoint was compared with itself.

    left_out: samples without losses. checkpoints: names of those compared. notes: checkpoints that cannot be read.
    """

    passes: tuple[LossPass, ...] = ()
    missing: str = ""
    alone: str = ""
    left_out: str = ""
    checkpoints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(part.step for part in self.passes if not part.is_blank)

    @property
    def obstacle(self) -> str:
        return "; ".join(filter(None, [self.alone, self.left_out]))


def sample_losses(
    job: JobConfig, splits: tuple[SplitIndex, ...], max_samples: int, told: Told, worker: ProcessContext
) -> RunLosses:
    """Each rank computes every n-th sample; all ranks return the losses of all. Collective.

    Raises what checkpoints raise that cannot be exported.
    """
    if job.train.in_pairs:
        return RunLosses(missing=IN_PAIRS)
    stored, faults = checkpoints_of(job)
    if not stored:
        return RunLosses(missing=NO_CHECKPOINT, notes=tuple(faults))
    compared = early_and_late(stored)
    chosen, left_out = chosen_samples(sum(map(len, splits)), max_samples)
    passes: list[LossPass] = []
    for checkpoint in compared:
        with opened_model(job, checkpoint, worker) as model:
            under = _Under(job, splits, chosen, model, checkpoint.step, told, worker)
            passes.append(under.losses(f"losses at step {checkpoint.step:,}"))
            if checkpoint is compared[-1]:
                passes.append(under.losses("losses without images", is_blank=True))
    alone = ""
    if len(compared) < 2:
        why = f"no checkpoint of at most {1 - MIN_GAP:.0%} of its steps is kept (train.keep_checkpoints)"
        alone = f"judged by step {compared[-1].step:,} alone: {why}"
    names = tuple(checkpoint.name for checkpoint in compared)
    return RunLosses(tuple(passes), "", alone, left_out, names, tuple(faults))


@dataclass(frozen=True)
class _Under:
    """The chosen samples of all splits under one checkpoint."""

    job: JobConfig
    splits: tuple[SplitIndex, ...]
    chosen: list[int]
    model: LossModel
    step: int
    told: Told
    worker: ProcessContext

    def losses(self, message: str, *, is_blank: bool = False) -> LossPass:
        parts, done, start = list[AnswerLosses](), 0, 0
        for split in self.splits:
            of_split = [sample - start for sample in self.chosen if start <= sample < start + len(split)]
            share = of_split[self.worker.rank :: self.worker.world_size]
            told = partial(self._tell, message, done)
            part = answer_losses(self.job, split, self.model, share, is_blank=is_blank, progressed=told)
            parts.append(joined(gather(part, self.worker)) if self.worker.world_size > 1 else part)
            done, start = done + len(of_split), start + len(split)
        return LossPass(self.step, is_blank, tuple(parts))

    def _tell(self, message: str, before: int, done: int) -> None:
        if self.worker.is_first:
            self.told(message, min(before + done * self.worker.world_size, len(self.chosen)), len(self.chosen))


def chosen_samples(samples: int, most: int) -> tuple[list[int], str]:
    """Samples whose losses are computed, and a sentence about the rest."""
    count = min(samples, most or samples)
    chosen = [number * samples // count for number in range(count)] if count else []
    left_out = f"losses of {count:,} of {samples:,} samples (max_samples)" if count < samples else ""
    return chosen, left_out
