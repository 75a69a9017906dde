"""The control of shuffled images: no question ever sees its own, whatever the sizes of images."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.support.data.prepared import png
from vlmpipe.trainer.evaluation.answer import ShownImages
from vlmpipe.trainer.evaluation.validation.shuffled_images import ShuffledImages
from vlmpipe.trainer.models.image_tokens import ImageForm
from vlmpipe.trainer.sizing.image_grids import VideoSize

Sample = list[tuple[str, tuple[int, int], int]]  # of each image its digest, its size and its tokens


class Split:
    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def image_token_counts(self, number: int) -> list[int]:
        return [tokens for _, _, tokens in self.samples[number]]

    def image_sizes(self, number: int) -> list[Any]:
        return [size for _, size, _ in self.samples[number]]

    def image_sha256(self, number: int) -> list[str]:
        return [digest for digest, _, _ in self.samples[number]]

    def sample_location(self, number: int) -> int:
        return number


class Shards:
    def images(self, number: int) -> list[bytes]:
        return [png(number * 10 + place) for place in range(9)]


def own_images(split: Split, sample: int) -> ShownImages:
    counts, sizes = split.image_token_counts(sample), split.image_sizes(sample)
    return ShownImages(counts, sizes, split.image_sha256(sample), lambda: [], are_cached=True)


def shuffled(samples: list[Sample]) -> tuple[Split, ShuffledImages]:
    split = Split(samples)
    return split, ShuffledImages(split, Shards(), ImageForm())  # type: ignore[arg-type]


images = st.tuples(st.sampled_from("abcdefg"), st.just((8, 8)), st.sampled_from([4, 9, 16]))


@given(st.lists(st.lists(images, max_size=3), min_size=1, max_size=12))
def test_other_images_have_the_tokens_of_the_questions_own_and_none_is_its_own(samples: list[Sample]) -> None:
    split, other = shuffled(samples)
    for sample in range(len(split)):
        own = own_images(split, sample)
        shown = other.instead_of(sample, own)
        if shown is None:
            different = {one for each in samples for one, _, _ in each} - set(own.sha256)
            assert not own.counts or len(different) < len(own.counts)
            continue
        assert (list(shown.counts), list(shown.sizes)) == (list(own.counts), list(own.sizes))
        assert {one.split(" ")[0] for one in shown.sha256}.isdisjoint(own.sha256)


def test_an_image_of_another_size_is_resized_to_that_of_the_questions_own() -> None:
    split, other = shuffled([[("a", (30, 20), 6)], [("b", (16, 16), 4)], [("c", (12, 40), 5)]])
    shown = other.instead_of(0, own_images(split, 0))
    assert shown and not shown.are_cached and shown.sha256 == ["b 30x20"]
    (data,) = shown.read()
    assert Image.open(io.BytesIO(data)).size == (30, 20)


@pytest.mark.parametrize(
    "samples",
    [
        [[("a", (8, 8), 4)], [("a", (9, 9), 5)]],  # the same image alone
        [[("a", VideoSize(8, 8, 2, 0.5), 4)], [("b", (9, 9), 5)]],
        [[], [("b", (9, 9), 5)]],
    ],
)
def test_a_question_without_another_image_is_left_out(samples: list[Sample]) -> None:
    split, other = shuffled(samples)
    assert other.instead_of(0, own_images(split, 0)) is None
