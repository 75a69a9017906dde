"""The loss on held-out rows while training goes on: does the model still learn what it has not seen?

The same rows each time, and the same whatever the number of processes: the first `train.validate_rows` rows of the
held-out split, packed as training packs. Neither dropout nor random numbers: training goes on as if nothing had been.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainer.config.job import JobConfig
from trainer.data.loader import RowLoader
from trainer.data.sampler import RowSequence
from trainer.data.shards.index import SplitIndex
from trainer.data.shards.tar import ShardReader
from trainer.dataloading.batches import ImageSource, RowBatch, collate
from trainer.distributed.data_parallel_rank import Replica
from trainer.errors import ConfigError
from trainer.models.image_tokens import ImageForm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from trainer.distributed.process import Worker
    from trainer.strategies.base import Strategy


@dataclass(frozen=True)
class HeldOut:
    """One copy's share of the rows. `label_tokens` are those of all copies."""

    loader: RowLoader
    image_source: ImageSource
    rows: list[list[int]]  # sample numbers of each row, none for an empty one; equally many for every copy
    micro_batch_rows: int
    label_tokens: int

    @cached_property
    def batches(self) -> list[RowBatch]:
        """Made once and kept: reading them again would push shards that training needs out of the cache."""
        rows = [self.loader.build_row(samples) for samples in self.rows]
        size = self.micro_batch_rows
        return [collate(rows[start : start + size], self.image_source) for start in range(0, len(rows), size)]

    def loss(self, strategy: Strategy, replica: Replica, worker: Worker) -> float:
        """Mean over the label tokens of all rows: of the average of the weights, where one is kept. Collective."""
        total = torch.zeros((), device=worker.device)
        with strategy.averaged():
            for batch in self.batches:
                total += strategy.forward_loss(batch)
        total = total.double() * replica.leads  # the other ranks of a copy have its loss too
        dist.all_reduce(total)
        return float(total.item()) / self.label_tokens


def held_out_of(
    job: JobConfig,
    split: SplitIndex,
    tokenizer: PreTrainedTokenizerFast,
    reader: ShardReader,
    image_source: ImageSource,
    replica: Replica,
    *,
    images: bool,
    form: ImageForm,
) -> HeldOut | None:
    """None when the run does not validate. Raises ConfigError when it has nothing to validate on."""
    settings = job.train
    if not settings.validate_every_steps:
        return None
    if not len(split):
        raise ConfigError(
            f"train.validate_every_steps {settings.validate_every_steps}, but no sample is held out",
            expected="samples in the held-out split",
            fix="raise data.held_out_fraction, or set train.validate_every_steps to 0",
        )
    step_rows = settings.micro_batch_rows * replica.count
    sequence = RowSequence.of(split, job.data, seed=0, global_batch_rows=step_rows, tile_tokens=form.tile_tokens)
    plan = sequence.plan(0)
    count = min(len(plan), settings.validate_rows)
    mine = [start + replica.index + replica.count * place
            for start in range(0, count, step_rows) for place in range(settings.micro_batch_rows)]  # fmt: skip
    members = [plan.row(row).tolist() if row < count else [] for row in mine]
    return HeldOut(
        RowLoader(split, sequence, tokenizer, reader, images=images, form=form),
        image_source,
        members,
        settings.micro_batch_rows,
        label_tokens=int(split.label_tokens[plan.members[: plan.offsets[count]]].sum()),
    )
