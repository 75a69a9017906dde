"""The share of the training samples that a run trains on, `data.train_share`: a pure function of ids and seed.

Groups of samples that share images come in the order of a hash of their first sample's id and the seed; a share takes
groups from the beginning, of each source its share. A smaller share is therefore contained in every larger one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.sources.data_fields import BY_RECORD
from vlmpipe.trainer.data.packing import Int64Array, shuffled_by_shards
from vlmpipe.trainer.data.prefixes.groups import PrefixGroups
from vlmpipe.trainer.data.shards.index import SplitIndex

FEWEST_COMMON = 20  # samples that an image must be in before its share counts, as where splits are made


class NestedSubset:
    """The draws of a run from a share of its training split: each sample of it once an epoch."""

    def __init__(self, split: SplitIndex, data: DataConfig, *, seed: int, prefixes: PrefixGroups | None = None) -> None:
        self._seed, self._at_a_time = seed, data.shuffle_shards
        self._samples = nested_samples(split, data, seed=seed)
        self._prefixes = prefixes and prefixes.part(self._samples)
        _, self._shards = np.unique(split.shard_numbers[self._samples], return_inverse=True)

    @property
    def decides(self) -> Int64Array:
        """(samples,) sample numbers, which the order depends on beside the settings."""
        return self._samples

    def drawn(self, epoch: int) -> Int64Array:
        """(draws,) sample numbers in the epoch's order."""
        order, _ = shuffled_by_shards(
            len(self._samples), self._seed, epoch, self._shards, self._at_a_time, prefixes=self._prefixes
        )
        return self._samples[order]


def nested_samples(
    split: SplitIndex, data: DataConfig, *, seed: int, sources: Sequence[range] | None = None
) -> Int64Array:
    """(samples,) numbers of the samples that `data.train_share` takes, ascending; of a split with samples at least one.

    A share ends with a whole group, so that it has the share or a little more.

    Args:
        sources: numbers of each source's samples, of which each has its share; None: all are one.
    """
    groups = np.arange(len(split)) if data.split_by == BY_RECORD else image_groups(split, data.max_image_share)
    first, of_sample = np.unique(groups, return_inverse=True)
    place = np.argsort(np.argsort(_hashes(split, first, seed), kind="stable"))[of_sample]
    parts = sources if sources is not None else [range(len(split))]
    return np.sort(np.concatenate([_first_groups(place, part, data.train_share) for part in parts]))


def _hashes(split: SplitIndex, samples: Int64Array, seed: int) -> NDArray[np.uint64]:
    """(samples,) hashes of ids and seed."""
    digests = (hashlib.sha256(f"{seed} {split.ids[number]}".encode()).digest() for number in samples.tolist())
    return np.array([int.from_bytes(digest[:8], "big") for digest in digests], np.uint64)


def _first_groups(place: Int64Array, part: range, share: float) -> Int64Array:
    """Numbers of the samples of `part` in the first groups that have the share of it."""
    places = place[part.start : part.stop]
    if not len(places):  # all samples of a small source may be for validation
        return np.zeros(0, np.int64)
    needed = max(1, round(share * len(places)))
    last = np.partition(places, needed - 1)[needed - 1]  # the group of the last sample that is needed
    return np.flatnonzero(places <= last) + part.start


def image_groups(split: SplitIndex, max_image_share: float) -> Int64Array:
    """(samples,) number of the first sample of each one's group: samples that share images, directly or by others.

    An image that more than `max_image_share` of the samples have next to others, such as a logo, joins none, except in
    samples that have no other.
    """
    count, names = len(split), split.images()
    group = np.arange(count)
    if not len(names):
        return group
    _, of_name = np.unique(names, return_inverse=True)
    image, owner = np.unique(np.stack([of_name, np.repeat(group, split.image_count)]), axis=1)
    next_to_others = np.bincount(owner, minlength=count)[owner] > 1
    found_in = np.bincount(image[next_to_others], minlength=int(image.max()) + 1)
    is_common = (found_in > max(FEWEST_COMMON, max_image_share * count))[image]
    has_other = np.bincount(owner[~is_common], minlength=count) > 0
    joins = ~(is_common & has_other[owner])
    image, owner = image[joins], owner[joins]
    while True:  # a round passes the lowest number on over every image, and to the number's own group
        of_image = np.full(len(found_in), count)
        np.minimum.at(of_image, image, group[owner])
        joined = group.copy()
        np.minimum.at(joined, owner, of_image[image])
        joined = joined[joined]
        if (joined == group).all():
            return group
        group = joined
