"""Validation loss during training, on packed sequences of the evaluation split, and whether an export has it too.

Each validation uses the first `TrainConfig.validated_sequences` packed sequences of the split, whatever the number of
processes, without dropout or random numbers, so that it does not change training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.loader import PackedLoader, PackedSequence
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import SplitIndex
from vlmpipe.trainer.data.shards.sample_ranges import SampleRanges
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.dataloading.batches import ImageSource, PackedBatch, collate
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.evaluation.answer_misses import AnswerMisses
from vlmpipe.trainer.records.metrics import read_metrics
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.transfer import in_parallel

if TYPE_CHECKING:
    from vlmpipe.trainer.distributed.process import ProcessContext
    from vlmpipe.trainer.strategies.base import Strategy


EXACT_MATCH = "validation_exact_match"
VALIDATION_LOSS = "validation_loss"  # of each source with "/" and its name after it
LABEL_TOKENS = "validation_label_tokens"


@dataclass(frozen=True)
class Group:
    """Packed sequences of one source; of a run with one source its name is "". `label_tokens` are of all ranks."""

    source: str
    batches: int  # of this rank, and as many of each other one
    label_tokens: int


@dataclass(frozen=True)
class Validation:
    """One data-parallel rank's share of the sequences, in the order of `groups`."""

    loader: PackedLoader
    image_source: ImageSource
    replica: DataParallelRank
    members: list[list[int]]  # sample numbers of each sequence, equally many sequences for every rank
    micro_batch_size: int
    groups: tuple[Group, ...]
    online: bool  # pixel values, not cached features
    misses: AnswerMisses | None = None  # where the exact match of answers is measured
    answers: Mapping[str, int] = field(default_factory=dict)  # index of each sample's first answer, for `misses`

    @property
    def label_tokens(self) -> int:
        """Label tokens of all ranks."""
        return sum(group.label_tokens for group in self.groups)

    @cached_property
    def sequences(self) -> list[PackedSequence]:
        """Read once: reading them again would evict shards that training needs."""
        return [self.loader.pack_sequence(samples) for samples in self.members]

    @cached_property
    def features(self) -> list[PackedBatch]:
        """All batches, which hold cached features: made once, as those lie in shards too."""
        return list(self._made())

    def batches(self) -> Iterable[PackedBatch]:
        """Pixel values are made in each validation, a batch ahead: encoded images take a small part of their memory."""
        return self._made() if self.online else self.features

    def _made(self) -> Iterator[PackedBatch]:
        size, part, parts = self.micro_batch_size, self.replica.part, self.replica.parts
        micro_batches = [self.sequences[start : start + size] for start in range(0, len(self.sequences), size)]
        answers = self.answers if self.misses else None
        return in_parallel(
            lambda some: collate(some, self.image_source, part=part, parts=parts, answers=answers),
            micro_batches,
            threads=1,
        )

    def losses(self, strategy: Strategy, worker: ProcessContext) -> dict[str, float]:
        """Mean loss over all label tokens, and of several sources over those of each, by the name of the metric; with
        the averaged weights if there are any. Collective.
        """
        totals = torch.zeros(len(self.groups), device=worker.device)
        if self.misses:
            self.misses.begin(self.label_tokens)
        owners = [number for number, group in enumerate(self.groups) for _ in range(group.batches)]
        with strategy.averaged():
            for owner, batch in zip(owners, self.batches(), strict=True):
                totals[owner] += strategy.forward_loss(batch)
        totals = totals.double()
        dist.all_reduce(totals)
        sums, label_tokens = totals.tolist(), self.label_tokens
        of_each = {
            f"{VALIDATION_LOSS}/{group.source}": sums_of_group / group.label_tokens
            for group, sums_of_group in zip(self.groups, sums, strict=True)
            if group.source
        }
        answers = {EXACT_MATCH: self.misses.exact_match()} if self.misses else {}
        return {VALIDATION_LOSS: sum(sums) / label_tokens, LABEL_TOKENS: label_tokens, **of_each, **answers}


def validation_of(
    job: JobConfig,
    split: SplitIndex,
    chat: Chat,
    reader: ShardReader,
    image_source: ImageSource,
    replica: DataParallelRank,
    *,
    images: bool,
    misses: AnswerMisses | None = None,
    ranges: SampleRanges | None = None,
) -> Validation | None:
    """Return the validation during training, or None for training on pairs and without a validation split.

    Raises ConfigError if the run file asks for validation and the split is empty.
    """
    settings = job.train
    if settings.in_pairs or not (len(split) or settings.validate_every_steps):
        return None
    if not len(split):
        raise ConfigError(
            f"train.validate_every_steps {settings.validate_every_steps}, but the validation split is empty",
            expected="samples in the validation split",
            fix="raise data.validation_fraction, or set train.validate_every_steps to 0",
        )
    step_sequences = settings.micro_batch_size * replica.count
    sequence = PackedBatchSampler(
        split,
        job.data,
        seed=0,
        global_batch_size=step_sequences,
        max_kept=chat.form.max_kept,
    )
    plan = sequence.plan(0)
    count = min(len(plan), settings.validated_sequences)
    by_name = {"": [plan.members_of(number).tolist() for number in range(count)]}
    if job.data.sources:
        by_name = by_source(by_name[""], lambda sample: split.ids[sample].partition("/")[0], sequence.fits)
    members, groups = [], []
    for source, sequences in by_name.items():
        starts = range(0, len(sequences), step_sequences)
        places = range(replica.index, step_sequences, replica.count)
        numbers = [start + place for start in starts for place in places]
        members += [sequences[number] if number < len(sequences) else [] for number in numbers]
        label_tokens = int(split.label_tokens[[sample for sequence in sequences for sample in sequence]].sum())
        groups.append(Group(source, len(numbers) // settings.micro_batch_size, label_tokens))
    return Validation(
        PackedLoader(split, sequence, chat, reader, images=images, ranges=ranges),
        image_source,
        replica,
        members,
        settings.micro_batch_size,
        tuple(groups),
        online=images,
        misses=misses,
        answers=_first_answers(
            split, [sample for sequences in by_name.values() for sequence in sequences for sample in sequence]
        ),
    )


def _first_answers(split: SplitIndex, samples: Sequence[int]) -> dict[str, int]:
    """Index of each sample's first answer by the sample's id: a sample has at most as many answers as labels."""
    ends = np.cumsum(split.label_tokens[list(samples)], dtype=np.int64)
    return {split.ids[sample]: int(end - split.label_tokens[sample]) for sample, end in zip(samples, ends, strict=True)}


def by_source(
    sequences: Iterable[Sequence[int]], source_of: Callable[[int], str], fits: Callable[[Sequence[int]], bool]
) -> dict[str, list[list[int]]]:
    """Repack the samples into sequences of one source each, by source name in order.

    A source gets at most as many sequences as have its samples now. `fits`: whether samples fit into one sequence.
    """
    repacked: dict[str, list[list[int]]] = {}
    for sequence in sequences:
        parts: dict[str, list[int]] = {}
        for sample in sequence:
            parts.setdefault(source_of(sample), []).append(sample)
        for source, part in parts.items():
            of_source = repacked.setdefault(source, [])
            if of_source and fits([*of_source[-1], *part]):
                of_source[-1] += part
            else:
                of_source.append(part)
    return dict(sorted(repacked.items()))


@dataclass(frozen=True)
class Bound:
    """The largest difference of two losses that rounding explains: `absolute` nats, and a share of the loss."""

    absolute: float
    share: float

    def of(self, loss: float) -> float:
        return self.absolute + self.share * abs(loss)


ROUNDED = Bound(0.02, 0.05)  # products in bf16, fp16 or 8 bits, in other kernels and other parts of a model
BOUNDS = {"fp32": Bound(0.001, 0.01)}  # with weights that are exported as they were trained


def as_in_training(job: JobConfig, step: int, *, averaged: bool, loss: float, label_tokens: int) -> dict[str, float]:
    """The validation loss of the export beside that which training had at `step` on the same sequences, for
    evaluate.json; empty where training took none of these weights on these tokens.

    Args:
        averaged: the export has the averaged weights.
        loss, label_tokens: of the export, on the first `TrainConfig.validated_sequences` packed sequences.

    Raises UserError (80) where they differ by more than rounding: the export holds other weights than were trained.
    """
    store = open_storage(job.run.run_uri)
    taken = {
        measured
        for line in read_metrics(store)
        if (line.step, line.number(LABEL_TOKENS), "ema_decay" in line.figures) == (step, label_tokens, averaged)
        and (measured := line.number(VALIDATION_LOSS)) is not None
    }
    if not taken:
        return {}
    rounds_to = job.train.precision if job.export_dtype == "fp32" else job.export_dtype
    in_training, bound = taken.pop(), BOUNDS.get(rounds_to, ROUNDED)
    if not abs(loss - in_training) <= bound.of(in_training):
        raise UserError(
            f"the export has a validation loss of {loss:.5f}, and training had {in_training:.5f} after step {step} on "
            f"the same {label_tokens:,} label tokens",
            expected=f"a difference of at most {bound.of(in_training):.5f}, which rounding in {rounds_to} explains",
            fix="run vlmpipe diagnose and report it: the checkpoint is whole, and sync-checkpoint and evaluate can be "
            "repeated from it with another version of vlmpipe",
            code=ExitCode.BAD_EXPORT,
        )
    return {"step": step, "label_tokens": label_tokens, "loss_in_training": in_training, "loss_of_export": loss}
