"""Micro-batches: what collation keeps, and the background thread that makes them."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from tests.support.trainer.packed_rows import ROW_TOKENS, no_images, row
from vlmpipe.trainer.data.chat.encode import IGNORED
from vlmpipe.trainer.dataloading.batches import collate


def test_a_label_is_predicted_from_the_token_before_it() -> None:
    batch = collate([row([IGNORED] * 4 + [4, 5, IGNORED, 7]), row([IGNORED, 1] + [IGNORED] * 6)], no_images)
    assert batch.label_index.tolist() == [3, 4, 6, ROW_TOKENS]
    assert batch.label_ids.tolist() == [4, 5, 7, 1]


def test_parts_of_a_batch_have_each_label_once() -> None:
    rows = [row([IGNORED] * 4 + [4, 5, IGNORED, 7]), row([IGNORED, 1] + [IGNORED] * 6)]
    whole, size = collate(rows, no_images), 2 * ROW_TOKENS // 4
    parts = [collate(rows, no_images, part=part, parts=4) for part in range(4)]
    found = torch.cat([batch.label_index + part * size for part, batch in enumerate(parts)])
    assert found.tolist() == whole.label_index.tolist()
    assert torch.cat([batch.label_ids for batch in parts]).tolist() == whole.label_ids.tolist()
    assert all(torch.equal(batch.input_ids, whole.input_ids) for batch in parts)


def test_host_has_the_sample_boundaries() -> None:
    whole = row([IGNORED] * ROW_TOKENS)
    packed = dataclasses.replace(whole, sample_tokens=(3, 2))
    batch = collate([whole, packed], no_images)
    assert batch.samples is not None and batch.samples.packed
    assert batch.samples.bounds.tolist() == [[0, 8], [8, 11], [11, 13]] + 13 * [[0, 0]]
    assert batch.samples.device_bounds.tolist() == [0, 8, 11, 13] + 12 * [16]
    assert not collate([whole, whole], no_images).samples.packed


def test_host_counts_image_tokens() -> None:
    batch = collate([row([IGNORED] * ROW_TOKENS, images=2), row([IGNORED] * ROW_TOKENS, images=1)], no_images)
    assert batch.image_tokens == 3
    assert batch.to(torch.device("cpu"))["image_tokens"] == 3


def test_labels_of_one_answer_have_one_index_also_where_parts_cut_it() -> None:
    """Two answers of the first sample, of two labels and of one; one of each other sample."""
    first = dataclasses.replace(
        row([IGNORED, 1, 2, IGNORED, 3, IGNORED, 4, 5]), sample_ids=("one", "other"), sample_tokens=(5, 3)
    )
    rows = [first, dataclasses.replace(row([IGNORED, 7] + [IGNORED] * 6), sample_ids=("third",))]
    answers = {"third": 0, "one": 1, "other": 4}
    whole = collate(rows, no_images, answers=answers).loss_sources
    assert whole is not None and whole.tolist() == [1, 1, 3, 4, 4, 0]
    parts = [collate(rows, no_images, part=part, parts=8, answers=answers).loss_sources for part in range(8)]
    assert [index for part in parts if part is not None for index in part.tolist()] == whole.tolist()


def test_each_label_and_each_part_of_a_batch_has_the_source_of_its_sample() -> None:
    first = dataclasses.replace(
        row([IGNORED, 1, 2, IGNORED, 3, IGNORED, IGNORED, IGNORED]),
        sample_ids=("cats/1", "dogs/1"),
        sample_tokens=(3, 2),
    )
    rows = [first, dataclasses.replace(row([IGNORED, 7] + [IGNORED] * 6), sample_ids=("dogs/2",))]
    assert collate(rows, no_images).loss_sources is None
    sources = {"cats": 0, "dogs": 1}
    whole = collate(rows, no_images, sources=sources).loss_sources
    assert whole is not None and whole.tolist() == [0, 0, 1, 1]
    parts = [collate(rows, no_images, part=part, parts=4, sources=sources).loss_sources for part in range(4)]
    assert [index for part in parts if part is not None for index in part.tolist()] == whole.tolist()


def test_each_pair_has_the_source_of_its_sample() -> None:
    pairs = dataclasses.replace(
        row([IGNORED, 1, IGNORED, 3, IGNORED, 5, IGNORED, 7]),
        sample_ids=("dogs/1", "cats/1"),
        sample_tokens=(2, 2, 2, 2),
        references=np.zeros(4, np.float32),
    )
    found = collate([pairs], no_images, sources={"cats": 0, "dogs": 1}).loss_sources
    assert found is not None and found.tolist() == [1, 0]
