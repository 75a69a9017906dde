"""Samples of several sources that an epoch draws, in order: a pure function of sizes, shares, seed and epoch.

Each source is read in passes, each pass in another order. An epoch takes up where the one before it stopped, so that no
sample is drawn a second time before all others of its source were drawn. The sources alternate so evenly that every
stretch of an epoch has their shares.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.packing import Int64Array, shuffled_by_shards
from vlmpipe.trainer.data.prefixes.groups import PrefixGroups
from vlmpipe.trainer.data.shards.index import SplitIndex
from vlmpipe.trainer.data.subsets.nested import nested_samples
from vlmpipe.trainer.errors import DataError

MANY_PASSES = 10  # of a source in an epoch


class Mixture:
    """The draws of a run from the sources of its training split."""

    def __init__(self, split: SplitIndex, data: DataConfig, *, seed: int, prefixes: PrefixGroups | None = None) -> None:
        self._data, self._seed, self._prefixes = data, seed, prefixes
        self._names = [source.name for source in data.sources]
        spans = [_samples_of(split, name) for name in self._names]
        self._samples = _shares(split, data, spans, seed) if data.train_share < 1 else spans
        self._shards = split.shard_numbers
        assert all(map(len, self._samples)), "preparation refuses a source without training samples"

    @property
    def decides(self) -> Int64Array:
        """(numbers,) what the order depends on beside the settings: first and last sample number of each source, or all
        numbers of a share."""
        spans = [np.array([span[0], span[-1]], np.int64) if isinstance(span, range) else span for span in self._samples]
        return np.concatenate(spans)

    def draws(self, epoch: int) -> list[int]:
        """How many samples the epoch draws from each source."""
        return draws_of(self._data, [len(samples) for samples in self._samples], epoch)

    def drawn(self, epoch: int) -> Int64Array:
        """(draws,) sample numbers in the epoch's order."""
        before = [sum(counts) for counts in zip(*map(self.draws, range(epoch)), strict=True)] or [0] * len(self._names)
        draws = self.draws(epoch)
        streams = [self._stream(number, *span) for number, span in enumerate(zip(before, draws, strict=True))]
        return np.concatenate(streams)[alternating(draws)]

    def _stream(self, number: int, first: int, count: int) -> Int64Array:
        """(count,) sample numbers of a source, from the draw `first` of the whole run on."""
        samples = self._samples[number]
        passes = range(first // len(samples), -(-(first + count) // len(samples)))
        drawn = [self._pass(number, of_source) for of_source in passes]
        start = first - passes.start * len(samples)
        return np.concatenate([*drawn, np.empty(0, np.int64)])[start : start + count].astype(np.int64)

    def _pass(self, number: int, of_source: int) -> Int64Array:
        samples = self._samples[number]
        places = slice(samples.start, samples.stop) if isinstance(samples, range) else samples
        _, shards = np.unique(self._shards[places], return_inverse=True)
        # All sources together mix as many shards at a time as a single one would.
        at_a_time = max(1, self._data.shuffle_shards // len(self._names))
        order, _ = shuffled_by_shards(
            len(samples),
            self._seed,
            of_source,
            shards,
            at_a_time,
            stream=f"{self._names[number]}/",
            prefixes=self._prefixes and self._prefixes.part(places),
        )
        return samples.start + order if isinstance(samples, range) else samples[order]


def draws_of(data: DataConfig, sizes: Sequence[int], epoch: int) -> list[int]:
    """Samples that an epoch draws from each of `data.sources`, which have `sizes` samples for training."""
    weights = data.weights(epoch)
    if weights is not None:
        return weighted_draws(sizes, weights, repeat=data.stopping_strategy == "all_exhausted")
    return [
        source.samples or max(1, round((source.epochs or 1.0) * size))
        for source, size in zip(data.sources, sizes, strict=True)
    ]


def passes_of(data: DataConfig, sizes: Sequence[int]) -> dict[str, float]:
    """How often an epoch reads each of `data.sources`, by name: the most of all phases."""
    epochs = [sum(phase.epochs for phase in data.phases[:number]) for number in range(len(data.phases))] or [0]
    passes = {source.name: 0.0 for source in data.sources}
    for epoch in epochs:
        for source, draws, size in zip(data.sources, draws_of(data, sizes, epoch), sizes, strict=True):
            passes[source.name] = max(passes[source.name], draws / size)
    return passes


def described_passes(data: DataConfig, sizes: Sequence[int]) -> str:
    """How often an epoch reads each source, for people. Raises DataError for one that it reads too often."""
    passes = passes_of(data, sizes)
    name, most = max(passes.items(), key=lambda item: item[1])
    if most > data.max_source_passes:
        raise DataError(
            f"an epoch reads {name} {most:,.0f} times, since it ends when the other sources were read",
            expected=f"at most {data.max_source_passes:,.15g} times (data.max_source_passes)",
            fix="give it a lower weight, set data.stopping_strategy: first_exhausted, or raise data.max_source_passes",
        )
    shown = ", ".join(f"{source} {count:.3g}" for source, count in passes.items())
    warning = f" (more than {MANY_PASSES} of {name}: it may be learned by heart)" if most > MANY_PASSES else ""
    return f"passes an epoch: {shown}{warning}"


def weighted_draws(sizes: Sequence[int], weights: Sequence[float], *, repeat: bool) -> list[int]:
    """Draws from each source in the ratio of the weights, at least one where its weight is above 0.

    They end when the first source is used up or, with `repeat`, when the last one is. `sizes` are above 0.
    """
    lengths = [size / weight for size, weight in zip(sizes, weights, strict=True) if weight]
    length = max(lengths) if repeat else min(lengths)
    return [max(1, round(length * weight)) if weight else 0 for weight in weights]


def alternating(draws: Sequence[int]) -> Int64Array:
    """Return (sum of draws,) an order of `draws` items of each kind, numbered one kind after the other.

    Item j of n stands at (j + 1/2) / n of the whole. So the number of a kind's items in any stretch is its share of the
    stretch, give or take 1 + its share x the number of kinds: up to each place a kind has its share within 1/2, and the
    place is within half the number of kinds.
    """
    places = [(np.arange(count) + 0.5) / max(1, count) for count in draws]
    return np.argsort(np.concatenate(places), kind="stable").astype(np.int64)


def share_size(split: SplitIndex, data: DataConfig, seed: int) -> int:
    """Return the number of training samples that `data.train_share` takes."""
    if data.train_share == 1:
        return len(split)
    spans = [_samples_of(split, source.name) for source in data.sources]
    return len(nested_samples(split, data, seed=seed, sources=spans or None))


def _shares(split: SplitIndex, data: DataConfig, spans: Sequence[range], seed: int) -> Sequence[range | Int64Array]:
    """Numbers of the samples of each source that `data.train_share` takes."""
    taken = nested_samples(split, data, seed=seed, sources=spans)
    return [taken[(taken >= span.start) & (taken < span.stop)] for span in spans]


def _samples_of(split: SplitIndex, name: str) -> range:
    """Numbers of a source's samples. Ids, which are in order, begin with the source's name and a slash."""
    after = chr(ord("/") + 1)
    return range(bisect_left(split.ids, f"{name}/"), bisect_left(split.ids, f"{name}{after}"))
