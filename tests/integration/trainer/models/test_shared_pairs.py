"""Pairs that compute their prompt and its images once have the loss, the hidden states and all gradients of pairs that
compute them with each answer: of pairs alone, and of several about one image.

Each way in which this was, or could be, got wrong changes gradients by more than the bounds here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.hf.publish import model_section
from tests.support.short_form import WHOLE
from tests.support.trainer.prefix_mistakes import (
    branches_see_each_other,
    mask_by_positions,
    no_gradient_of_log_sum_exps,
    positions_run_on,
)
from tests.support.trainer.shared_prefixes import LLAVA, Computed, SharedPrefixes, apart, job_of, write_pairs
from vlmpipe.trainer.data.loader import PackedSequence
from vlmpipe.trainer.data.prefixes.groups import PrefixGroups
from vlmpipe.trainer.dataloading import batches
from vlmpipe.trainer.dataloading.batches import PackedBatch
from vlmpipe.trainer.models.attention import merged_parts

pytest_plugins = ("tests.support.hf.published",)

BOUNDS = {torch.float64: 1e-6, torch.float32: 5e-6}  # as of questions: see test_shared_prefixes.py
VISIBLE = 1e-3  # a mistake's difference of gradients, at least
HF = ("qwen2_5_vl", "internvl", "llava_onevision", "idefics3", "qwen3_vl", "glm46v") if WHOLE else ("qwen2_5_vl",)
GRIDS = ("qwen2_5_vl", "qwen3_vl")  # whose positions the loader makes


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> SharedPrefixes:
    return case_of(tmp_path_factory.mktemp("llava"), LLAVA)


@pytest.fixture(scope="module")
def separate(llava: SharedPrefixes) -> Computed:
    return llava.computed(None)


def case_of(root: Path, model: dict[str, Any], objective: str = "dpo", **data: Any) -> SharedPrefixes:
    data = write_pairs(root / "data") | {"share_prefix": "on"} | data
    made = SharedPrefixes(job_of(root, model, data, objective=objective))
    known = np.random.default_rng(0).normal(-9, 2, (len(made.split), 2))
    made.references = known.astype(np.float32)
    return made


@pytest.mark.parametrize("dtype", BOUNDS, ids=["float64", "float32"])
def test_shared_equals_separate_in_llava(llava: SharedPrefixes, dtype: torch.dtype) -> None:
    shared, separate = llava.computed_in(dtype)
    assert max(apart(shared, separate).values()) < BOUNDS[dtype], apart(shared, separate)
    rows, lone = llava.sequences(llava.groups), llava.sequences(None)
    assert sum(row.tokens for row in rows) < 0.6 * sum(row.tokens for row in lone)
    assert sum(len(row.images) for row in rows) == 6 and sum(len(row.images) for row in lone) == 26
    spans = [span for row in rows for span in row.prefixes]
    assert any(inner[0] == outer[1] for inner in spans for outer in spans), "pairs about one image"
    assert "model.model.vision_tower.embeddings.patch_embedding.weight" in shared.gradients


def test_shared_equals_separate_for_simpo_and_a_reference(tmp_path: Path) -> None:
    """The reference's pass asks for log probabilities, whose sum is compared here."""
    case = case_of(tmp_path, LLAVA, "simpo")
    for references in (case.references, None):
        case.references = references
        shared, separate = (case.computed(groups) for groups in (case.groups, None))
        assert max(apart(shared, separate).values()) < BOUNDS[torch.float64], apart(shared, separate)


@pytest.mark.parametrize("model_type", HF)
def test_shared_equals_separate_in_family_hf(model_type: str, published: Callable[[str], Path], tmp_path: Path) -> None:
    case = case_of(tmp_path, model_section(published(model_type), freeze=()), sequence_length=512)
    shared, separate = (case.computed(groups) for groups in (case.groups, None))
    assert max(apart(shared, separate).values()) < BOUNDS[torch.float64], apart(shared, separate)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", GRIDS)
def test_shared_equals_separate_where_images_are_grids(
    model_type: str, published: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_section(published(model_type), freeze=(), max_pixels=2048)
    case = case_of(tmp_path, model, sequence_length=512)
    shared, separate = (case.computed(groups) for groups in (case.groups, None))
    assert max(apart(shared, separate).values()) < BOUNDS[torch.float64], apart(shared, separate)


def test_pairs_of_an_image_in_pieces_equal_the_whole(llava: SharedPrefixes, separate: Computed) -> None:
    for most in (1, 2):
        groups = llava.split.prefix_groups(most)
        found = apart(llava.computed(groups), separate)
        assert max(found.values()) < BOUNDS[torch.float64], found
    lone = [span for row in llava.sequences(llava.split.prefix_groups(1)) for span in row.prefixes]
    assert len(lone) == len(llava.split) and all(start < end < stop for start, end, stop in lone)


@pytest.mark.parametrize("mistake", [positions_run_on, branches_see_each_other, mask_by_positions])
def test_a_mistake_in_a_batch_is_seen(
    llava: SharedPrefixes, separate: Computed, mistake: Callable[[PackedBatch], PackedBatch]
) -> None:
    for groups in (llava.split.prefix_groups(1), llava.groups):
        found = apart(llava.computed(groups, mistake), separate)
        assert found["gradients"] > VISIBLE, found


def rejected_sees_chosen(batch: PackedBatch) -> PackedBatch:
    """Where several pairs share an image: bounds of the image's prefix alone."""
    assert batch.samples and batch.samples.prefixes is not None
    spans = [tuple(span) for span in batch.samples.prefixes.tolist()]
    ends = {end for _, end, _ in spans}
    inner = [(start, stop) for start, end, stop in spans if start < end and start in ends]
    assert inner
    bounds = [span for span in batch.samples.bounds.tolist() if not any(a <= span[0] < b for a, b in inner)]
    merged = sorted([*map(tuple, bounds), *inner], key=lambda span: (span[0] == span[1], span))
    merged += [(0, 0)] * (len(batch.samples.bounds) - len(merged))
    kept = [(0, 0, 0) if (span[0], span[2]) in inner else span for span in spans]
    samples = dataclasses.replace(
        batch.samples,
        bounds=torch.tensor(merged, dtype=torch.int32),
        prefixes=torch.tensor(kept, dtype=torch.int32),
    )
    return dataclasses.replace(batch, samples=samples)


def test_a_rejected_answer_that_sees_the_chosen_one_is_seen(llava: SharedPrefixes, separate: Computed) -> None:
    def where_nested(batch: PackedBatch) -> PackedBatch:
        assert batch.samples and batch.samples.prefixes is not None
        spans = batch.samples.prefixes.tolist()
        nested = any(a[0] == b[1] for a in spans for b in spans if a[0] < a[1])
        return rejected_sees_chosen(batch) if nested else batch

    found = apart(llava.computed(llava.groups, where_nested), separate)
    assert found["gradients"] > VISIBLE, found


def test_kernels_whose_log_sum_exp_has_no_gradient_are_seen(
    llava: SharedPrefixes, separate: Computed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged_parts, "with_parts", no_gradient_of_log_sum_exps)
    found = apart(llava.computed(llava.groups), separate)
    assert found["loss"] < 1e-6 and found["hidden"] < 1e-9, "the loss does not show it"
    assert found["gradients"] > VISIBLE


@pytest.mark.parametrize("further", ["one token", "all equal ones"])
def test_a_label_in_the_prefix_is_seen(
    further: str, llava: SharedPrefixes, separate: Computed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token more, and the last token of the chosen answer predicts the rejected one. All tokens that both begin
    with, and labels that belong to both answers count for the chosen one only."""
    right = llava.split.pair_prefix_tokens
    longer = right + 1 if further == "one token" else np.array([common_tokens(llava, n) for n in range(len(right))])
    assert (longer >= right).all() and (longer > right).any()
    monkeypatch.setattr(type(llava.split), "pair_prefix_tokens", property(lambda _: longer.astype(np.int32)))
    found = apart(llava.computed(llava.split.prefix_groups(1)), separate)
    assert found["loss"] > VISIBLE and found["gradients"] > VISIBLE, found


def common_tokens(case: SharedPrefixes, number: int) -> int:
    from vlmpipe.trainer.data.loader import PackedLoader
    from vlmpipe.trainer.data.shards.tar import ShardReader

    loader = PackedLoader(case.split, case.sampler(None), case.chat, ShardReader.open(case.storage))
    chosen, rejected = (encoded.input_ids for encoded in loader._encode(number))
    return next((place for place, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), 0)


def test_answers_bounded_by_whole_conversations_are_seen(
    llava: SharedPrefixes, separate: Computed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log probabilities are sums over the tokens of a branch."""

    def whole_ends(sequences: list[PackedSequence]) -> list[int]:
        ends = []
        for number, row in enumerate(sequences):
            starts = np.cumsum([0, *row.sample_tokens])[:-1]
            shared = [sum(b - a for a, b, stop in row.prefixes if a < start and b <= start < stop) for start in starts]
            ends += (number * len(row.input_ids) + np.cumsum(np.add(row.sample_tokens, shared))).tolist()
        return ends

    monkeypatch.setattr(batches, "_sample_ends", whole_ends)
    found = apart(llava.computed(llava.groups), separate)
    assert found["hidden"] < 1e-9, "hidden states do not show it"
    assert found["loss"] > VISIBLE and found["gradients"] > VISIBLE, found


def test_pairs_found_by_token_ids_alone_are_seen(llava: SharedPrefixes, separate: Computed) -> None:
    """Two images of one size have the same tokens."""
    numbers = [llava.split.ids.index(name) for name in ("same-0-0", "same-1-1")]
    assert llava.groups.group[numbers[0]] != llava.groups.group[numbers[1]]
    group = np.arange(len(llava.split), dtype=np.int32)
    group[numbers[1]] = numbers[0]
    found = apart(llava.computed(PrefixGroups(group, llava.groups.prefix_tokens)), separate)
    assert found["gradients"] > VISIBLE, found
