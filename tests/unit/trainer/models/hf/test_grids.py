"""What the training module does with grids, without a read, is what the library does with one, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from tests.support.trainer.tiny_native import TEXT, model_section
from vlmpipe.trainer.config.model import GRID_FAMILIES, ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.attention.varlen import mask_of
from vlmpipe.trainer.models.hf.grids import precomputed, project
from vlmpipe.trainer.models.hf.vision_attention import sizes_of
from vlmpipe.trainer.models.image_inputs import Grid
from vlmpipe.trainer.models.layers.image_placeholders import add_levels_at_places, places_of, put
from vlmpipe.trainer.models.registry import family_of

CPU = torch.device("cpu")
VOCABULARY, ROW_TOKENS = 300, 48
# Windows are of 2 x 2 tokens, which are 4 x 4 patches: images of part of one, of one, and of several and a part.
GRIDS: list[Grid] = [(1, 2, 2), (1, 4, 4), (1, 6, 10), (1, 12, 4), (1, 2, 8)]
IMAGES = {"one": GRIDS[2:3], "unlike sizes": GRIDS, "none": []}
FAMILIES = sorted(GRID_FAMILIES)


def module_of(family_name: str) -> Any:
    """The training module with all of it trained, and random weights so large that attention tells tokens apart."""
    config = ModelConfig.model_validate(model_section(family_name, freeze=()))
    family = family_of(config)
    torch.manual_seed(0)
    model = family.skeleton(config, vocabulary=VOCABULARY)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim < 2), std=0.2)
    return family.training_module(config, model, cached=False).train()


def patches_of(module: Any, grids: list[Grid]) -> Tensor:
    numbers = module.model.model.visual.patch_embed.proj.weight[0].numel()
    return torch.randn(sum(rows * columns for _, rows, columns in grids), numbers)


def sequences_of(grids: list[Grid]) -> dict[str, Tensor]:
    """Two rows of two samples each; all images are in the first, some in each sample."""
    input_ids = torch.randint(VOCABULARY - 1, (2, ROW_TOKENS))
    tokens = sum(rows * columns for _, rows, columns in grids) // 4
    input_ids[0, torch.randperm(ROW_TOKENS)[:tokens]] = VOCABULARY - 1
    places = torch.cat([torch.arange(30), torch.arange(ROW_TOKENS - 30)]).repeat(4, 2, 1)
    places[1:] = torch.randint_like(places[1:], 40)
    index = torch.arange(0, 2 * ROW_TOKENS - 1, 3)
    return {
        "input_ids": input_ids,
        "position_ids": places,
        "label_index": index,
        "label_ids": input_ids.flatten()[index + 1],
    }


def loss_by_the_library(module: Any, rows: dict[str, Tensor], patches: Tensor, grids: list[Grid]) -> Tensor:
    """The same loss by the library's own forward passes, which are told nothing."""
    base = module.model.model
    (tower,) = module._tower
    output = tower(patches, grid_thw=torch.tensor(grids or [(1, 2, 2)]))
    features = torch.cat([output.pooler_output, *(getattr(output, "deepstack_features", None) or ())], dim=-1)
    projected = project(base.visual, features if grids else features[:0])
    base.language_model.__dict__.pop("_deepstack_process", None)
    hidden = base(
        input_ids=rows["input_ids"],
        position_ids=rows["position_ids"],
        attention_mask=mask_of(base.language_model.config, rows["position_ids"][0], packed=True),
        mm_encoder_outputs={"image": precomputed(projected, base.visual)},
        use_cache=False,
    ).last_hidden_state
    labelled = hidden.flatten(0, 1)[rows["label_index"]]
    loss: Tensor = module.token_loss(module.model.lm_head, labelled, rows["label_ids"])
    return loss


def gradients(module: Any, loss: Tensor) -> dict[str, Tensor | None]:
    module.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("images", IMAGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_transformers(family: str, images: str) -> None:
    grids, module = IMAGES[images], module_of(family)
    rows = sequences_of(grids)
    patches = patches_of(module, grids or GRIDS[:1])
    mine = module(**rows, images=patches if grids else patches[:0], image_grids=grids)
    mine, of_mine = mine.detach(), gradients(module, mine)
    theirs = loss_by_the_library(module, rows, patches if grids else torch.zeros_like(patches), grids)
    of_theirs = gradients(module, theirs)
    assert torch.equal(mine, theirs)
    for name, gradient in of_theirs.items():
        found = of_mine[name]
        assert found is None if gradient is None else torch.equal(found, gradient), name
    towers = [gradient for name, gradient in of_theirs.items() if ".visual.blocks." in name]
    assert any(gradient is not None and gradient.any() for gradient in towers) == bool(grids)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_accepts_all_named_sizes(family: str) -> None:
    """What is left would go on to attention, which passes over what it does not know."""
    module = module_of(family)
    (tower,) = module._tower
    taken: list[set[str]] = []
    tower.blocks[0].register_forward_pre_hook(lambda _, args, named: taken.append(set(named)), with_kwargs=True)
    tower(patches_of(module, GRIDS), grid_thw=None, **sizes_of(tower, GRIDS, CPU))
    assert taken == [{"cu_seqlens", "max_seqlen", "position_embeddings"}]


def masks() -> Any:
    rows = st.integers(1, 3).flatmap(lambda count: st.lists(st.booleans(), min_size=5 * count, max_size=5 * count))
    return rows.map(lambda flat: torch.tensor(flat).view(-1, 5))


@given(mask=masks())
def test_places_equal_those_of_the_mask(mask: Tensor) -> None:
    assert torch.equal(places_of(mask, int(mask.sum())), mask.flatten().nonzero()[:, 0])


@given(mask=masks())
def test_more_places_than_images_are_an_error(mask: Tensor) -> None:
    if count := int(mask.sum()):
        with pytest.raises(RuntimeError):
            places_of(mask, count - 1)


@given(mask=masks())
def test_images_are_put_at_the_masks_positions(mask: Tensor) -> None:
    places = places_of(mask, int(mask.sum()))

    def both(scatter: Any) -> list[Tensor]:
        torch.manual_seed(0)
        hidden = torch.randn(*mask.shape, 4, requires_grad=True)
        images = torch.randn(len(places), 4, requires_grad=True)
        made = scatter(hidden, images)
        return [made, *torch.autograd.grad(made.sin().sum(), (hidden, images))]

    mine = both(lambda hidden, images: put(hidden, places, images))
    theirs = both(lambda hidden, images: hidden.masked_scatter(mask.unsqueeze(-1), images))
    assert all(map(torch.equal, mine, theirs))


def test_the_backward_pass_saves_only_places(language_model: Any) -> None:
    """Neither the images nor a mask of all tokens' numbers, which a plan would lack."""
    add_levels_at_places(language_model)
    hidden, images = torch.randn(2, 6, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    places, kept = torch.tensor([1, 4, 7]), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        language_model._deepstack_process(put(hidden, places, images), places, images)
    assert len(kept) == 2 and all(torch.equal(one, places) for one in kept)


@pytest.fixture
def language_model() -> Iterator[Qwen3VLTextModel]:
    yield Qwen3VLTextModel(Qwen3VLTextConfig(**TEXT | {"head_dim": 8}))


def test_a_level_is_added_at_places_and_at_a_mask(language_model: Any) -> None:
    hidden, mask = torch.randn(2, 6, 4), torch.rand(2, 6) > 0.5
    level = torch.randn(int(mask.sum()), 4)
    theirs = language_model._deepstack_process(hidden, mask, level)
    add_levels_at_places(language_model)
    add_levels_at_places(language_model)  # of a model of which a second training module is made
    assert torch.equal(language_model._deepstack_process(hidden, mask, level), theirs)
    assert torch.equal(language_model._deepstack_process(hidden, places_of(mask, len(level)), level), theirs)


def test_an_unknown_transformers_method_is_refused() -> None:
    class Other(nn.Module):
        def _deepstack_process(self, hidden_states: Tensor, visual_embeds: Tensor) -> Tensor:
            return hidden_states + visual_embeds

    for language_model in (nn.Module(), Other()):
        with pytest.raises(ConfigError, match="adds images after language layers in an unknown way"):
            add_levels_at_places(language_model)
