"""Shares of the training samples: nested, of whole groups of images, of each source, and a pure function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.mixture import Mixture
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.subsets.nested import NestedSubset, image_groups, nested_samples
from vlmpipe.trainer.errors import ConfigError

SHARES = (0.05, 0.1, 0.2, 0.4, 1.0)


class Split:
    """Samples with these images each."""

    name = "train"

    def __init__(self, images: list[list[int]], ids: list[str] | None = None) -> None:
        self.ids = ids or [f"{number:05}" for number in range(len(images))]
        self._images = np.array([f"{one:032}" for of_sample in images for one in of_sample], "S32")
        self.image_count = np.array([len(one) for one in images], np.int32)
        self.shard_numbers = np.arange(len(images)) // 10
        self.tokens, self.label_tokens = np.full(len(images), 10), np.ones(len(images), np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def images(self) -> Any:
        return self._images

    def shown(self) -> Any:
        return self.image_count


def split(images: list[list[int]], ids: list[str] | None = None) -> Any:
    return Split(images, ids)


def data(share: float, **fields: Any) -> DataConfig:
    source = {} if "sources" in fields else {"source": "a.json"}
    return DataConfig.model_validate({**source, "sequence_length": 100, "train_share": share, **fields})


IMAGES = st.lists(st.lists(st.integers(0, 30), max_size=3), min_size=1, max_size=60)


@given(IMAGES, st.integers(0, 9))
def test_a_smaller_share_is_part_of_a_larger_one_and_takes_whole_groups(images: list[list[int]], seed: int) -> None:
    of, groups = split(images), image_groups(split(images), 1.0)
    before: set[int] = set()
    for share in SHARES:
        taken = nested_samples(of, data(share, max_image_share=1.0), seed=seed).tolist()
        assert before <= set(taken) and len(taken) >= max(1, round(share * len(images)))
        assert {groups[number] for number in taken}.isdisjoint(
            groups[number] for number in range(len(images)) if number not in taken
        )
        before = set(taken)
    assert before == set(range(len(images)))


@given(IMAGES)
def test_groups_are_the_components_of_samples_that_share_images(images: list[list[int]]) -> None:
    expected = list(range(len(images)))
    for _ in images:
        for number, one in enumerate(images):
            for other, two in enumerate(images):
                if set(one) & set(two):
                    expected[number] = min(expected[number], expected[other])
    assert image_groups(split(images), 1.0).tolist() == expected


def test_a_logo_joins_no_samples_and_records_of_one_image_stay_together() -> None:
    with_logo = [[0, number + 1] for number in range(60)]
    assert image_groups(split(with_logo), 0.05).tolist() == list(range(60))
    assert set(image_groups(split([[7]] * 60), 0.05).tolist()) == {0}


def test_a_share_depends_on_ids_and_seed_alone() -> None:
    ids = [f"{number:05}" for number in range(400)]
    images = [[number // 2] for number in range(400)]
    taken = nested_samples(split(images, ids), data(0.1), seed=3)
    # The same pairs of samples, ten of them gone, which others then replace.
    gone = {int(number) for number in taken[:10]}
    kept = [number for number in range(400) if number not in gone]
    again = nested_samples(split([images[n] for n in kept], [ids[n] for n in kept]), data(0.1), seed=3)
    names = {kept[number] for number in again}
    assert set(taken.tolist()) - gone <= names
    assert set(nested_samples(split(images, ids), data(0.1), seed=4).tolist()) != set(taken.tolist())


def test_an_epoch_draws_each_sample_of_the_share_once_in_an_order_of_its_own() -> None:
    of = split([[number] for number in range(300)])
    subset = NestedSubset(of, data(0.2), seed=0)
    first, second = subset.drawn(0).tolist(), subset.drawn(1).tolist()
    assert sorted(first) == sorted(second) == nested_samples(of, data(0.2), seed=0).tolist()
    assert first != second
    sampler = PackedBatchSampler(of, data(0.2), seed=0, global_batch_size=2, mixture=subset)
    assert sorted(sampler.plan(3).members.tolist()) == sorted(first)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_each_source_has_its_share(share: float) -> None:
    ids = [f"a/{n:04}" for n in range(200)] + [f"b/{n:04}" for n in range(40)]
    of = split([[number] for number in range(240)], ids)
    sources = [{"name": "a", "uri": "a.json", "weight": 1}, {"name": "b", "uri": "b.json", "weight": 1}]
    drawn = Mixture(of, data(share, sources=sources), seed=0).drawn(0)
    assert len(np.unique(drawn[drawn < 200])) == round(share * 200)
    assert len(np.unique(drawn[drawn >= 200])) == round(share * 40)


def test_a_source_with_no_training_samples_has_no_share() -> None:
    samples = nested_samples(
        split([[number] for number in range(8)]), data(0.5), seed=0, sources=[range(8), range(8, 8)]
    )
    assert len(samples) == 4


def test_a_share_that_fills_no_batch_is_refused() -> None:
    of = split([[number] for number in range(100)])
    small = PackedBatchSampler(of, data(0.2), seed=0, global_batch_size=4, mixture=NestedSubset(of, data(0.2), seed=0))
    with pytest.raises(ConfigError, match=r"20 samples of data.train_share 0.2 are 2 packed sequences") as caught:
        small.require_batch()
    assert "train.global_batch_size 4" in str(caught.value.expected)
    PackedBatchSampler(of, data(1.0), seed=0, global_batch_size=400).require_batch()  # as before: one short batch


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, 20])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValidationError, match="train_share"):
        data(share)


def test_a_source_with_a_number_of_samples_has_no_share() -> None:
    with pytest.raises(ValidationError, match=r"train_share 0\.5 and a source with a number of samples an epoch, a"):
        data(0.5, sources=[{"name": "a", "uri": "a.json", "samples": 10}])
