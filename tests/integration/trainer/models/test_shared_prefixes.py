"""Samples that share a prefix have the loss, the hidden states and all gradients of separate samples.

Each way in which this was, or could be, got wrong changes gradients by more than the bounds here, some of them without
any change of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.hf.publish import model_section
from tests.support.short_form import WHOLE
from tests.support.trainer.native_videos import video_job
from tests.support.trainer.prefix_mistakes import (
    branches_see_each_other,
    mask_by_positions,
    no_gradient_of_log_sum_exps,
    positions_run_on,
)
from tests.support.trainer.shared_prefixes import LLAVA, SharedPrefixes, apart, job_of, write_questions
from tests.support.trainer.tiny_native import TILES
from tests.support.trainer.tiny_native import model_section as native_section
from vlmpipe.trainer.data.prefixes.groups import PrefixGroups
from vlmpipe.trainer.dataloading.batches import PackedBatch, cached_images
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.attention import merged_parts
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.setup.shared_prefix import require_shared_prefix

pytest_plugins = ("tests.support.hf.published",)

# Of the largest: sums in another order; in float64 also norms and rotary parts, which the library computes in float32.
BOUNDS = {torch.float64: 1e-6, torch.float32: 5e-6}
VISIBLE = 1e-3  # a mistake's difference of gradients, at least
HF = ("qwen2_5_vl", "internvl", "llava_onevision", "idefics3", "qwen3_vl", "glm46v") if WHOLE else ("qwen2_5_vl",)
GRIDS = ("qwen2_5_vl", "qwen3_vl") if WHOLE else ("qwen3_vl",)  # whose positions the loader makes


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> SharedPrefixes:
    root = tmp_path_factory.mktemp("llava")
    return SharedPrefixes(job_of(root, LLAVA, write_questions(root / "data") | {"share_prefix": "on"}))


@pytest.fixture(scope="module")
def axes(published: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> SharedPrefixes:
    """A model of family hf whose positions have three axes."""
    return of_type("qwen2_5_vl", published, tmp_path_factory.mktemp("axes"))


def of_type(model_type: str, published: Callable[[str], Path], root: Path, **changes: Any) -> SharedPrefixes:
    model = model_section(published(model_type), freeze=(), **changes)
    data = write_questions(root / "data") | {"share_prefix": "on", "sequence_length": 512}
    return SharedPrefixes(job_of(root, model, data))


@pytest.mark.parametrize("dtype", BOUNDS, ids=["float64", "float32"])
def test_shared_equals_separate_in_llava(llava: SharedPrefixes, dtype: torch.dtype) -> None:
    shared, separate = llava.computed_in(dtype)
    assert max(apart(shared, separate).values()) < BOUNDS[dtype], apart(shared, separate)
    rows, lone = llava.sequences(llava.groups), llava.sequences(None)
    assert sum(row.tokens for row in rows) < sum(row.tokens for row in lone)
    assert any(len(row.prefixes) > 1 for row in rows)
    assert sum(len(row.images) for row in rows) == 7 < sum(len(row.images) for row in lone)
    assert "model.model.vision_tower.embeddings.patch_embedding.weight" in shared.gradients


@pytest.mark.parametrize("model_type", HF)
def test_shared_equals_separate_in_family_hf(
    model_type: str, published: Callable[[str], Path], tmp_path: Path, axes: SharedPrefixes
) -> None:
    case = axes if model_type == "qwen2_5_vl" else of_type(model_type, published, tmp_path)
    require_shared_prefix(case.job.model)
    shared, separate = (case.computed(groups) for groups in (case.groups, None))
    assert max(apart(shared, separate).values()) < BOUNDS[torch.float64], apart(shared, separate)


@pytest.mark.parametrize("model_type", GRIDS)
def test_shared_equals_separate_where_images_are_grids(
    model_type: str, published: Callable[[str], Path], tmp_path: Path
) -> None:
    case = of_type(model_type, published, tmp_path, max_pixels=2048)
    require_shared_prefix(case.job.model)
    shared, separate = (case.computed(groups) for groups in (case.groups, None))
    assert max(apart(shared, separate).values()) < BOUNDS[torch.float64], apart(shared, separate)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smolvlm", f"smolvlm{TILES}"])
def test_shared_equals_separate_in_family_smolvlm(name: str, tmp_path: Path) -> None:
    data = write_questions(tmp_path / "data") | {"share_prefix": "on", "sequence_length": 512}
    case = SharedPrefixes(job_of(tmp_path, native_section(name, freeze=[]), data))
    require_shared_prefix(case.job.model)
    shared, separate = (case.computed(groups) for groups in (case.groups, None))
    assert max(apart(shared, separate).values()) < BOUNDS[torch.float64], apart(shared, separate)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_shared_equals_separate_where_images_are_videos(family: str, tmp_path: Path) -> None:
    """Positions in seconds, and texts of times before each patch of frames."""
    shown = (
        ("long", "<video>", {"videos": ["long.mp4"]}),
        ("short", "<video>", {"videos": ["short.mp4"]}),
        ("both", "<image> <video>", {"videos": ["long.mp4"], "image": "a.png"}),
    )
    records = [
        {"id": f"{name}-{place}", **files, "asked": f"{marks}\nwhat is at place {place}?"}
        for name, marks, files in shown
        for place in range(3)
    ]
    changes = {"data.share_prefix": "on", "model.freeze": [], "data.max_images_per_sequence": 64}
    case = SharedPrefixes(video_job(tmp_path, family, records=records, **changes))
    shared, separate = (case.computed(groups) for groups in (case.groups, None))
    assert len(np.unique(case.groups.group)) == len(shown)
    assert max(apart(shared, separate).values()) < BOUNDS[torch.float64], apart(shared, separate)


def test_features_are_read_and_projected_once_a_group(llava: SharedPrefixes, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked, projected = llava.job.model, list[str](), list[int]()
    tokens, width = family_of(model).feature_shape(model)

    class Reader:
        def read_all(self, images: list[str]) -> Tensor:
            asked.extend(images)
            return torch.zeros(len(images) * tokens, width)

    reader: Any = Reader()
    monkeypatch.setattr(llava, "images", cached_images(reader, model))
    monkeypatch.setitem(llava.module.model.model._modules, "vision_tower", None)  # as with cached features
    projector = llava.module.model.model.multi_modal_projector
    with projector.register_forward_hook(lambda _module, inputs, _output: projected.append(len(inputs[0]))):
        llava.computed(llava.groups)
    of_samples = [image for number in range(len(llava.split)) for image in llava.split.image_sha256(number)]
    assert len(asked) == sum(projected) == len(set(of_samples)) == 7 < len(of_samples)


def test_a_group_in_two_pieces_equals_the_whole(llava: SharedPrefixes) -> None:
    whole, pieces = (llava.computed(groups) for groups in (llava.groups, llava.split.prefix_groups(2)))
    assert max(apart(pieces, whole).values()) < BOUNDS[torch.float64]


def test_kernels_whose_log_sum_exp_has_no_gradient_are_seen(
    llava: SharedPrefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    separate = llava.computed(None)
    monkeypatch.setattr(merged_parts, "with_parts", no_gradient_of_log_sum_exps)
    found = apart(llava.computed(llava.groups), separate)
    assert found["loss"] < 1e-9 and found["hidden"] < 1e-9, "the loss does not show it"
    assert found["gradients"] > VISIBLE


@pytest.mark.parametrize("mistake", [positions_run_on, branches_see_each_other, mask_by_positions])
def test_a_mistake_in_a_batch_is_seen(llava: SharedPrefixes, mistake: Callable[[PackedBatch], PackedBatch]) -> None:
    found = apart(llava.computed(llava.groups, mistake), llava.computed(None))
    assert found["gradients"] > VISIBLE, found


def test_three_axes_that_go_on_from_the_number_of_tokens_are_seen(
    axes: SharedPrefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = type(axes.module)._rope_positions

    def by_tokens(self: Any, input_ids: Tensor, position_ids: Tensor, inputs: Any, samples: CuSeqlens) -> Tensor:
        places = plain(self, input_ids, position_ids, inputs, samples).flatten(1)
        for start, end, stop in samples.prefixes.tolist() if samples.prefixes is not None else []:
            places[1:, end:stop] = places[0, end:stop]
            assert stop == start or int(places[0, end]) == end - start
        return places.view(4, *input_ids.shape)

    monkeypatch.setattr(type(axes.module), "_rope_positions", by_tokens)
    found = apart(axes.computed(axes.groups, change=lambda batch: batch), axes.computed(None))
    assert found["gradients"] > VISIBLE, found


def regrouped(case: SharedPrefixes, names: list[str], tokens: int | None = None) -> PrefixGroups:
    """These samples alone in a group, with a prefix of so many tokens."""
    numbers = [case.split.ids.index(name) for name in names]
    group = np.arange(len(case.split), dtype=np.int32)
    group[numbers] = numbers[0]
    prefix_tokens = np.zeros(len(case.split), np.int32)
    prefix_tokens[numbers] = case.groups.prefix_tokens[numbers[0]] if tokens is None else tokens
    return PrefixGroups(group, prefix_tokens)


def test_a_prefix_found_by_token_ids_alone_is_seen(llava: SharedPrefixes) -> None:
    """Two images of one size have the same tokens."""
    names = ["same-0-0", "same-1-1"]
    assert llava.split.image_sizes(llava.split.ids.index(names[0])) == llava.split.image_sizes(
        llava.split.ids.index(names[1])
    )
    groups = [llava.groups.group[llava.split.ids.index(name)] for name in (*names, "same-0-2")]
    assert groups[0] != groups[1] and groups[0] == groups[2]
    found = apart(llava.computed(regrouped(llava, names)), llava.computed(None))
    assert found["gradients"] > VISIBLE, found


def test_a_label_in_the_prefix_and_one_behind_it_are_seen(llava: SharedPrefixes) -> None:
    """A prefix with the equal first turns of samples has labels, which would count once; one up to an answer leaves
    its first token to be predicted by another sample's last one."""
    names = ["turns-0", "turns-1", "turns-2"]
    encoded = [each for name in names for each in encoded_of(llava, name)]
    ends = encoded[0].ends_of_labels()
    first = next(place for place, label in enumerate(encoded[0].labels) if label != -100)
    assert encoded[0].input_ids[: ends[0]] == encoded[1].input_ids[: ends[0]]
    separate = llava.computed(None)
    for tokens in (ends[0], first):
        found = apart(llava.computed(regrouped(llava, names, tokens)), separate)
        assert found["loss"] > VISIBLE / 10 and found["gradients"] > VISIBLE, (tokens, found)
    right = apart(llava.computed(regrouped(llava, names, first - 1)), separate)
    assert right["gradients"] < BOUNDS[torch.float64]


def encoded_of(case: SharedPrefixes, name: str) -> Any:
    from vlmpipe.trainer.data.loader import PackedLoader
    from vlmpipe.trainer.data.shards.tar import ShardReader

    loader = PackedLoader(case.split, case.sampler(None), case.chat, ShardReader.open(case.storage))
    return loader._encode(case.split.ids.index(name))


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_5"])
def test_a_type_whose_samples_cannot_share_is_refused(
    model_type: str, published: Callable[[str], Path], tmp_path: Path
) -> None:
    model = job_of(tmp_path, model_section(published(model_type)), {"source": "x", "sequence_length": 64}).model
    with pytest.raises(ConfigError, match=r"data\.share_prefix is on, and ") as caught:
        require_shared_prefix(model)
    assert "share_prefix to off" in caught.value.fix
