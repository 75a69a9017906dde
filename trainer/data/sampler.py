"""Order of a run's packed sequences; a position in it is one integer.

Epochs are packed independently. A global batch is the next `global_batch_size` sequences; the last one of an epoch may
be short, so that epochs do not mix. `sequences_consumed`, the number of sequences before a batch, is the whole state:
epoch and position follow from it, whatever the number of processes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.machine_plans import FROM_SAMPLES, MachinePlans, of_machine
from vlmpipe.trainer.data.mixture import Mixture
from vlmpipe.trainer.data.packing import Int64Array, Integers, PackingPlan, plan_packing
from vlmpipe.trainer.data.prefixes.groups import PrefixGroups
from vlmpipe.trainer.data.shards.index import SplitIndex
from vlmpipe.trainer.data.subsets.nested import NestedSubset
from vlmpipe.trainer.errors import ConfigError, DataError

PLANS_KEPT = 2  # this epoch's and the one being prefetched


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The packed sequences of one optimizer step: `start` to `stop` of the epoch's plan."""

    epoch: int
    start: int
    stop: int
    sequences_consumed: int  # before this batch

    def __len__(self) -> int:
        return self.stop - self.start

    def sequences_of(self, rank: int, world_size: int) -> list[int | None]:
        """Numbers of one rank's sequences: equally many on every rank, None where the batch has no more."""
        sequences: list[int | None] = list(range(self.start + rank, self.stop, world_size))
        sequences_per_rank = -(-len(self) // world_size)
        return sequences + [None] * (sequences_per_rank - len(sequences))


@dataclass(frozen=True, slots=True)
class EpochTotals:
    """Sums over the samples of an epoch, each counted as often as it is drawn, and images as often as they are shown:
    those of a pair twice, unless its conversations share them."""

    samples: int
    sequences: int
    tokens: int
    label_tokens: int
    squared_tokens: int  # twice the pairs of tokens that see each other, which the cost of attention is proportional to
    images: int
    shown: int  # images, and patches in time of videos
    image_tokens: int


class PackedBatchSampler:
    """Packing plans of all epochs, made when needed. Safe to use from several threads."""

    def __init__(
        self,
        split: SplitIndex,
        data: DataConfig,
        *,
        seed: int,
        global_batch_size: int,
        in_pairs: bool = False,
        max_kept: int | None = None,
        mixture: Mixture | NestedSubset | None = None,
        share_from: int | None = None,
        prefixes: PrefixGroups | None = None,
    ) -> None:
        """
        Args:
            in_pairs: a sample is two conversations about its images.
            max_kept: tokens of an image that a sequence has room for, where the model selects some; None: all.
            mixture: what each epoch draws; None: every sample once.
            share_from: samples from which on the machine's processes share their plans; None: they never do.
            prefixes: which samples share a prefix, that is in a sequence once; None: none do.
        """
        if not len(split):
            raise DataError(f"the {split.name} split has no samples", expected="at least one sample to pack")
        self.data, self.global_batch_size, self.in_pairs = data, global_batch_size, in_pairs
        self._split, self._seed, self.seed = split, seed, seed
        self._mixture, self.prefixes = mixture, prefixes
        self._of_pairs = split.pair_prefix_tokens if in_pairs and prefixes else None
        # (samples,) of whole samples, as they are packed: of pairs without what their conversations share
        self._whole = split.tokens if max_kept is None else split.tokens_with(max_kept)
        self.tokens = self._whole if self._of_pairs is None else self._whole - self._of_pairs
        # How often an image is shown, (samples,) or one number for all.
        self._times: Integers | int = 1 + in_pairs
        if self._of_pairs is not None:
            self._times = np.where(self._of_pairs == 0, 2, 1).astype(np.int32)
        self._shown: Integers = split.shown() * self._times if in_pairs else split.shown()
        self._of_machine = None if share_from is None or len(split) < share_from else self._machine_plans()
        self._plans: dict[int, PackingPlan] = {}
        self._num_sequences: list[int] = []
        self._lock = threading.RLock()  # num_sequences holds it while it plans

    @classmethod
    def of_training(cls, split: SplitIndex, job: JobConfig) -> PackedBatchSampler:
        """The order of a run's training split."""
        assert job.data.share_prefix != "auto", "see resolved_sharing"
        shares = job.data.share_prefix == "on" and len(split)
        prefixes = split.prefix_groups(job.data.max_questions_per_image) if shares else None
        return cls(
            split,
            job.data,
            seed=job.train.seed,
            global_batch_size=job.train.global_batch_size,
            in_pairs=job.train.in_pairs,
            max_kept=job.model.relevance.max_tokens if job.model.relevance else None,
            mixture=_mixture_of(split, job.data, job.train.seed, prefixes) if len(split) else None,
            share_from=FROM_SAMPLES,
            prefixes=prefixes,
        )

    def fits(self, samples: Sequence[int]) -> bool:
        """Return whether these samples fit into one packed sequence."""
        numbers = np.asarray(samples, np.int64)
        if not self.data.pack:
            return len(numbers) <= 1
        tokens, shown = int(self.tokens[numbers].sum()), int(self._shown[numbers].sum())
        return tokens <= self.data.sequence_length and shown <= self.data.max_images_per_sequence

    def plan(self, epoch: int) -> PackingPlan:
        """The packed sequences of one epoch."""
        with self._lock:
            if epoch not in self._plans:
                self._plans[epoch] = self._of_machine.plan(epoch) if self._of_machine else self._planned(epoch)
                for old in sorted(self._plans)[:-PLANS_KEPT]:
                    if old != epoch:
                        del self._plans[old]
            return self._plans[epoch]

    def _planned(self, epoch: int) -> PackingPlan:
        return plan_packing(
            self.tokens,
            self._shown,
            sequence_length=self.data.sequence_length,
            max_images_per_sequence=self.data.max_images_per_sequence,
            seed=self._seed,
            epoch=epoch,
            pack=self.data.pack,
            shards=self._split.shard_numbers,
            shuffle_shards=self.data.shuffle_shards,
            drawn=self._mixture.drawn(epoch) if self._mixture else None,
            prefixes=self.prefixes,
        )

    def _machine_plans(self) -> MachinePlans | None:
        lengths = [self.tokens, self._shown, self._split.shard_numbers]
        sources: list[Integers] = [self._mixture.decides] if self._mixture else []
        sources += [self.prefixes.group, self.prefixes.prefix_tokens] if self.prefixes else []
        return of_machine([f"{self._seed} {self.data.model_dump_json()}".encode(), *lengths, *sources], self._planned)

    def num_sequences(self, epoch: int) -> int:
        """Sequences in an epoch; epochs differ a little, as each packs another order."""
        with self._lock:
            if not self._num_sequences:
                self._num_sequences.append(len(self.plan(0)))
            if len(self._num_sequences) <= epoch:
                self._count(epoch + 1)
            return self._num_sequences[epoch]

    def num_steps(self, epochs: int, *, max_steps: int = 0) -> int:
        """Optimizer steps in the first `epochs` epochs, at most `max_steps` (0: all); no later epoch is planned."""
        steps = 0
        for epoch in range(epochs):
            steps += self._steps_of(epoch)
            if self._of_machine and epoch == 0:
                needed = -(-max_steps // steps) if max_steps else epochs  # epochs differ a little
                self._count(min(needed, epochs))
            if 0 < max_steps <= steps:
                return max_steps
        return steps

    def require_batch(self) -> None:
        """Raise ConfigError where the samples that `data.train_share` takes do not fill one global batch."""
        if self.data.train_share < 1 and self.num_sequences(0) < self.global_batch_size:
            samples = f"the {len(self.plan(0).members):,} samples of data.train_share {self.data.train_share:g}"
            raise ConfigError(
                f"{samples} are {self.num_sequences(0):,} packed sequences, fewer than a batch",
                expected=f"at least train.global_batch_size {self.global_batch_size:,}",
                fix="set a larger data.train_share, or a smaller train.global_batch_size for all shares",
            )

    def batch_at(self, sequences_consumed: int) -> GlobalBatch:
        """The global batch after `sequences_consumed` sequences."""
        epoch, start = 0, sequences_consumed
        while start >= self.num_sequences(epoch):
            start -= self.num_sequences(epoch)
            epoch += 1
        stop = min(start + self.global_batch_size, self.num_sequences(epoch))
        return GlobalBatch(epoch, start, stop, sequences_consumed)

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of an optimizer step, counted from 0."""
        epoch = sequences_before = 0
        while step >= self._steps_of(epoch):
            step -= self._steps_of(epoch)
            sequences_before += self.num_sequences(epoch)
            epoch += 1
        return self.batch_at(sequences_before + step * self.global_batch_size)

    def first_sequences(self, count: int) -> list[list[int]]:
        """Sample numbers of the first packed sequences, at most `count`."""
        plan = self.plan(0)
        return [plan.members_of(sequence).tolist() for sequence in range(min(count, self.num_sequences(0)))]

    def members(self, batch: GlobalBatch) -> Int64Array:
        """Sample numbers of a global batch."""
        plan = self.plan(batch.epoch)
        return plan.members[plan.offsets[batch.start] : plan.offsets[batch.stop]]

    def totals(self, epoch: int) -> EpochTotals:
        """Sums over one epoch, of prefixes that samples share once each."""
        plan, split = self.plan(epoch), self._split
        tokens, squares, bring_images = self._stored(plan)
        with_images = plan.members[bring_images]
        return EpochTotals(
            samples=len(plan.members),
            sequences=len(plan),
            tokens=int(tokens.sum()),
            label_tokens=int(split.label_tokens[plan.members].sum()),
            squared_tokens=int(squares.sum()),
            images=int((split.image_count * self._times)[with_images].sum()),
            shown=int(self._shown[with_images].sum()),
            image_tokens=int(((split.image_tokens - split.tokens + self._whole) * self._times)[with_images].sum()),
        )

    def _stored(self, plan: PackingPlan) -> tuple[Int64Array, Int64Array, Int64Array | slice]:
        """(members,) tokens that each sample of a plan adds to its sequence, twice the pairs of tokens that see each
        other among them and those before, and the places of samples that bring their images."""
        tokens = self.tokens[plan.members].astype(np.int64)
        squares = np.square(self._whole[plan.members].astype(np.int64))
        if self.in_pairs:  # whose conversations are about equally long
            squares //= 2
        if self._of_pairs is not None:
            squares -= np.square(self._of_pairs[plan.members].astype(np.int64))
        if self.prefixes is None:
            return tokens, squares, slice(None)
        is_first = self.prefixes.is_first(plan.members, plan.offsets)
        shared = np.where(is_first, 0, self.prefixes.prefix_tokens[plan.members]).astype(np.int64)
        return tokens - shared, squares - np.square(shared), np.flatnonzero(is_first)

    def label_tokens(self, batch: GlobalBatch) -> int:
        """Label tokens of a global batch, over all ranks."""
        return int(self._split.label_tokens[self.members(batch)].sum())

    def loss_terms(self, batch: GlobalBatch) -> int:
        """The divisor of the summed loss: label tokens of a global batch, or its pairs."""
        return len(self.members(batch)) if self.in_pairs else self.label_tokens(batch)

    def _count(self, epochs: int) -> None:
        """Count the sequences of the first `epochs` epochs, those of large data sets side by side with other ranks."""
        with self._lock:
            missing = range(len(self._num_sequences), epochs)
            counts = self._of_machine.sequences(missing) if self._of_machine else map(len, map(self.plan, missing))
            self._num_sequences += counts

    def _steps_of(self, epoch: int) -> int:
        return -(-self.num_sequences(epoch) // self.global_batch_size)


def _mixture_of(
    split: SplitIndex, data: DataConfig, seed: int, prefixes: PrefixGroups | None
) -> Mixture | NestedSubset | None:
    """Samples that each epoch draws; None: every sample once."""
    if data.sources:
        return Mixture(split, data, seed=seed, prefixes=prefixes)
    return NestedSubset(split, data, seed=seed, prefixes=prefixes) if data.train_share < 1 else None
