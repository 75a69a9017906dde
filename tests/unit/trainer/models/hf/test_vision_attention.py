"""Attention of a tower: numbers of the library's calls piece by piece, in few calls."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from tests.support.trainer.tiny_native import model_section
from vlmpipe.trainer.config.model import GRID_FAMILIES, ModelConfig
from vlmpipe.trainer.models.hf import vision_attention
from vlmpipe.trainer.models.hf.encoder import without_mergers
from vlmpipe.trainer.models.hf.grids import tower_output
from vlmpipe.trainer.models.hf.model import HfVLM
from vlmpipe.trainer.models.hf.vision_attention import Pieces, at_once, attention, by_runs, sizes_of, use_few_launches
from vlmpipe.trainer.models.image_inputs import Grid
from vlmpipe.trainer.models.registry import family_of

CPU = torch.device("cpu")
# Windows are of 4 x 4 patches: images of part of one, of one, of several and a part, two alike, and a video.
GRIDS: list[Grid] = [(1, 2, 2), (1, 4, 4), (1, 6, 10), (1, 12, 4), (1, 8, 8), (1, 8, 8), (2, 4, 6)]


def tower_of(family_name: str) -> Any:
    config = ModelConfig.model_validate(model_section(family_name, freeze=()))
    torch.manual_seed(0)
    model = family_of(config).skeleton(config, vocabulary=300)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim < 2), std=0.2)
    use_few_launches(model.model.visual)
    return without_mergers(model.model.visual)


def of_library(sizes: dict[str, Any]) -> dict[str, Any]:
    return {name: value.bounds if isinstance(value, Pieces) else value for name, value in sizes.items()}


def output_and_gradients(tower: Any, patches: Tensor, sizes: dict[str, Any]) -> list[Tensor]:
    output = tower_output(tower, patches, sizes)
    trained = [one for one in tower.parameters() if one.requires_grad]
    gradients = torch.autograd.grad(output.square().sum(), trained, allow_unused=True)
    return [output.detach(), *(one for one in gradients if one is not None)]


@pytest.mark.parametrize("family", sorted(GRID_FAMILIES))
def test_it_is_the_librarys_attention_piece_by_piece(family: str) -> None:
    tower = tower_of(family)
    numbers = tower.patch_embed.proj.weight[0].numel()
    patches = torch.randn(sum(times * rows * columns for times, rows, columns in GRIDS), numbers)
    sizes = sizes_of(tower, GRIDS, CPU)
    found = output_and_gradients(tower, patches, sizes)
    tower.config._attn_implementation = "sdpa"
    expected = output_and_gradients(tower, patches, of_library(sizes))
    assert len(found) == len(expected) > 10
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def calls_of_a_picture(monkeypatch: pytest.MonkeyPatch, *, library: bool) -> int:
    """Of 1,008 x 1,008 pixels in a tower of the published depth and windows, and of few numbers."""
    calls: list[int] = []
    product = F.scaled_dot_product_attention

    def counted(*tensors: Tensor, **given: Any) -> Tensor:
        calls.append(1)
        return product(*tensors, **given)

    config: Any = Qwen2_5_VLConfig().vision_config
    config.hidden_size, config.intermediate_size, config.num_heads, config.out_hidden_size = 16, 16, 1, 16
    encoder = Qwen2_5_VisionTransformerPretrainedModel(config)
    use_few_launches(encoder)
    tower: Any = without_mergers(encoder)
    sizes = sizes_of(tower, [(1, 72, 72)], CPU)
    if library:
        tower.config._attn_implementation = "sdpa"
        sizes = of_library(sizes)
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(F, "scaled_dot_product_attention", counted)
        tower_output(tower, torch.zeros(72 * 72, 1176), sizes)
    return len(calls)


def test_a_megapixel_takes_a_call_a_layer_where_its_windows_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_of_a_picture(monkeypatch, library=True) == 2272
    assert calls_of_a_picture(monkeypatch, library=False) == 32


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_runs_hold_every_piece_once(lengths: list[int]) -> None:
    ends = list(itertools.accumulate(lengths, initial=0))
    pieces = Pieces.of(ends, CPU)
    spans = [(start + n * tokens, tokens) for start, tokens, count in pieces.runs for n in range(count)]
    assert spans == [(start, tokens) for start, tokens in zip(ends, lengths, strict=False) if tokens]
    assert pieces.bounds.tolist() == ends and pieces.longest == max(lengths)


def test_bounds_of_the_librarys_own_forward_pass_are_read() -> None:
    query, key, value = (torch.randn(1, 2, 7, 8) for _ in range(3))
    ends = torch.tensor([0, 3, 7])
    module, scaling = nn.Identity(), 8**-0.5
    found, _ = attention(module, query, key, value, None, scaling=scaling, cu_seq_lens_q=ends)
    assert torch.equal(found, by_runs(query, key, value, Pieces.of([0, 3, 7], CPU), scaling))
    assert found.shape == (1, 7, 2, 8)
    ends.tolist = lambda: pytest.fail("the host waits in each layer")  # type: ignore[method-assign]
    again, _ = attention(module, query, key, value, None, scaling=scaling, cu_seq_lens_q=ends)
    assert torch.equal(again, found)


def test_any_type_with_a_merger_trains_with_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for each run of windows of one size; the library makes one for each window and each image."""
    calls: list[int] = []
    product = F.scaled_dot_product_attention
    config = ModelConfig.model_validate(model_section("qwen2_5_vl", freeze=()))
    model = family_of(config).skeleton(config, vocabulary=300)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    numbers, grids = model.model.visual.patch_embed.proj.weight[0].numel(), torch.tensor([[1, 16, 16], [1, 16, 16]])
    inputs = {"pixel_values": torch.randn(512, numbers), "image_grid_thw": grids}
    expected = model.model.get_image_features(**inputs).pooler_output
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *given, **named: calls.append(1) or product(*given, **named)
    )
    with torch.no_grad():
        model.model.get_image_features(**inputs)
        by_library = len(calls)
        module = HfVLM(config, model, images=None)
        calls.clear()
        found = module.features(inputs)
    assert (by_library, len(calls)) == (34, 2)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_torchs_kernel_takes_the_arguments_and_gives_that_shape() -> None:
    """In tensors without numbers: whether its numbers are right, a GPU tells (`_is_right`)."""
    query, key, value = (torch.empty(1, 2, 7, 8, dtype=torch.bfloat16, device="meta") for _ in range(3))
    pieces = Pieces(((0, 7, 1),), torch.empty(2, dtype=torch.int32, device="meta"), 7)
    found = at_once(query, key, value, pieces, 8**-0.5)
    assert found.shape == (1, 7, 2, 8) and found.dtype == torch.bfloat16


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = (CPU, torch.float32, 2, 8)
    vision_attention._is_right.cache_clear()
    monkeypatch.setattr(vision_attention, "at_once", by_runs)
    assert vision_attention._is_right(*kind)

    def wrong(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scaling: float) -> Tensor:
        return by_runs(query, key, value, Pieces.of([0, query.shape[2]], CPU), scaling)

    def without_gradient(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scaling: float) -> Tensor:
        key = key * 1
        key.register_hook(lambda gradient: gradient * torch.nan)
        return by_runs(query, key, value, pieces, scaling)

    broken_kernels = (
        (wrong, "differ from those"), (without_gradient, "by nan of"), (at_once, "is not used in the tower")
    )  # fmt: skip
    for broken, why in broken_kernels:
        vision_attention._is_right.cache_clear()
        monkeypatch.setattr(vision_attention, "at_once", broken)
        with pytest.warns(UserWarning, match=why):
            assert not vision_attention._is_right(*kind)
    vision_attention._is_right.cache_clear()
