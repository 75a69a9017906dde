"""Validation loss during training, on packed sequences of the evaluation split.

Each validation uses the first `train.validation_sequences` packed sequences of the split, whatever the number of
processes, without dropout or random numbers, so that it does not change training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.loader import PackedLoader, PackedSequence
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import SplitIndex
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.dataloading.batches import ImageSource, PackedBatch, collate
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.transfer import in_parallel

if TYPE_CHECKING:
    from vlmpipe.trainer.distributed.process import ProcessContext
    from vlmpipe.trainer.strategies.base import Strategy


@dataclass(frozen=True)
class Validation:
    """One data-parallel rank's share of the sequences. `label_tokens` counts those of all ranks."""

    loader: PackedLoader
    image_source: ImageSource
    replica: DataParallelRank
    rows: list[list[int]]  # sample numbers of each sequence, equally many sequences for every rank
    micro_batch_size: int
    label_tokens: int
    online: bool  # pixel values, not cached features

    @cached_property
    def sequences(self) -> list[PackedSequence]:
        """Read once: reading them again would evict shards that training needs."""
        return [self.loader.pack_sequence(samples) for samples in self.rows]

    @cached_property
    def features(self) -> list[PackedBatch]:
        """All batches, which hold cached features: made once, as those lie in shards too."""
        return list(self._made())

    def batches(self) -> Iterable[PackedBatch]:
        """Pixel values are made in each validation, a batch ahead: encoded images take a small part of their memory."""
        return self._made() if self.online else self.features

    def _made(self) -> Iterator[PackedBatch]:
        size, part, parts = self.micro_batch_size, self.replica.part, self.replica.parts
        rows = [self.sequences[start : start + size] for start in range(0, len(self.sequences), size)]
        return in_parallel(lambda some: collate(some, self.image_source, part=part, parts=parts), rows, threads=1)

    def loss(self, strategy: Strategy, worker: ProcessContext) -> float:
        """Mean loss over all label tokens, with the averaged weights if there are any. Collective."""
        total = torch.zeros((), device=worker.device)
        with strategy.averaged():
            for batch in self.batches():
                total += strategy.forward_loss(batch)
        total = total.double()
        dist.all_reduce(total)
        return float(total.item()) / self.label_tokens


def validation_of(
    job: JobConfig,
    split: SplitIndex,
    chat: Chat,
    reader: ShardReader,
    image_source: ImageSource,
    replica: DataParallelRank,
    *,
    images: bool,
) -> Validation | None:
    """None when the run does not validate. Raises ConfigError when it has nothing to validate on."""
    settings = job.train
    if not settings.validate_every_steps:
        return None
    if not len(split):
        raise ConfigError(
            f"train.validate_every_steps {settings.validate_every_steps}, but no sample is held out",
            expected="samples in the held-out split",
            fix="raise data.validation_fraction, or set train.validate_every_steps to 0",
        )
    step_sequences = settings.micro_batch_size * replica.count
    sequence = PackedBatchSampler(
        split,
        job.data,
        seed=0,
        global_batch_size=step_sequences,
        tile_tokens=chat.form.tile_tokens,
        most_kept=chat.form.most_kept,
    )
    plan = sequence.plan(0)
    count = min(len(plan), settings.validation_sequences)
    mine = [start + replica.index + replica.count * place
            for start in range(0, count, step_sequences) for place in range(settings.micro_batch_size)]  # fmt: skip
    members = [plan.row(row).tolist() if row < count else [] for row in mine]
    return Validation(
        PackedLoader(split, sequence, chat, reader, images=images),
        image_source,
        replica,
        members,
        settings.micro_batch_size,
        label_tokens=int(split.label_tokens[plan.members[: plan.offsets[count]]].sum()),
        online=images,
    )
