"""Where a model is cut into pipeline stages, and what a stage keeps of it."""

from __future__ import annotations

import itertools
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.trainer.flop_cases import model_config
from tests.support.trainer.memory_cases import Case
from tests.support.trainer.tiny_native import model_section
from tests.support.trainer.tiny_runs import merged
from vlmpipe.planner.memory.pipeline_partition import sequence_flops
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import GRID_FAMILIES, ModelConfig
from vlmpipe.trainer.data.sampler import EpochTotals
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.setup.data import mean_sequence_flops
from vlmpipe.trainer.sizing.pipeline_partition import Costs, Stage, cut, end_costs, schedule_passes, stages_of
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape, inputs_of

VOCABULARY = 300
# Of Qwen3-VL two inner layers of the tower reach the first two of the language model's four.
DEEP: dict[str, Any] = {
    "pretrained.config.text_config.num_hidden_layers": 4,
    "pretrained.config.vision_config.depth": 3,
    "pretrained.config.vision_config.deepstack_visual_indexes": [0, 1],
}
CONFIGS = {"llava": model_config(), "llava, tied": model_config()} | {
    family: ModelConfig.model_validate(merged(model_section(family), DEEP)) for family in GRID_FAMILIES
}
MODELS = list(CONFIGS)


@given(
    layers=st.integers(2, 9),
    stages=st.integers(2, 4),
    costs=st.builds(Costs, st.integers(0, 60), st.integers(1, 20), st.integers(0, 60)),
    in_first=st.integers(0, 2),
)
def test_no_cut_has_a_cheaper_fullest_stage(layers: int, stages: int, costs: Costs, in_first: int) -> None:
    def fullest(counts: tuple[int, ...]) -> float:
        return max(end + count * costs.layer for end, count in zip(end_costs(stages, costs), counts, strict=True))

    found = cut(layers, stages, costs, in_first=in_first)
    assert [number for stage in found for number in stage.layers] == list(range(layers))
    assert [stage.is_first for stage in found] == [True] + [False] * (stages - 1)
    assert [stage.is_last for stage in found] == [False] * (stages - 1) + [True]
    every = (counts for counts in itertools.product(range(layers + 1), repeat=stages) if sum(counts) == layers)
    allowed = (counts for counts in every if counts[0] >= in_first)
    assert fullest(tuple(len(stage.layers) for stage in found)) == min(map(fullest, allowed))
    assert len(found[0].layers) >= in_first


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 stages .* are more than the language model's 2 layers"):
        stages_of(2, 3, None, image_layers=0)


@pytest.mark.parametrize(("layers", "image_layers", "most"), [(4, 2, 3), (4, 3, 2), (5, 2, 4)])
def test_layers_behind_which_images_are_added_stay_together(layers: int, image_layers: int, most: int) -> None:
    assert len(stages_of(layers, most, None, image_layers=image_layers)[0].layers) == image_layers
    with pytest.raises(ConfigError, match=rf"(?s){most + 1} stages \(train\.pipeline_parallel.* at most {most} stages"):
        stages_of(layers, most + 1, None, image_layers=image_layers)


def test_the_trainer_cuts_for_the_mean_image_as_the_plan_does() -> None:
    config = Case("pp", family="qwen2_5_vl").config(2)
    shape = family_of(config.model).shape(config.model)
    epoch = EpochTotals(
        samples=3,
        sequences=2,
        tokens=200,
        label_tokens=150,
        squared_tokens=14_000,
        images=3,
        shown=3,
        image_tokens=21,
    )
    job, sequence = cast(JobConfig, config), Mock(totals=Mock(return_value=epoch))
    load = Workload.from_index(
        config, samples=3, tokens=200, pairs=14_000, images=3, image_tokens=21, label_tokens=150, sequences=2, steps=1
    )
    planned = sequence_flops(config, load.sized(shape), load, cached=False)
    assert mean_sequence_flops(job, shape, sequence, cached=False) == planned
    assert planned != sequence_flops(config, shape, load, cached=False), "the largest image is another one"


@pytest.mark.parametrize("model", MODELS)
def test_stages_one_after_another_compute_what_the_whole_model_does(model: str) -> None:
    whole, inputs = built(model), rows_for(model)
    blocks = family_of(CONFIGS[model]).blocks(whole)
    names = {name for name, _ in whole.named_parameters()}
    hidden: Tensor | None = None
    in_stages: list[str] = []
    for stage in stages_of(len(blocks.language_layers), 2, None, image_layers=blocks.image_layers):
        module = built(model)
        module.reduce_to(stage)
        in_stages += [name for name, _ in module.named_parameters()]
        hidden = module(**(inputs if stage.is_first else without_images(inputs)), hidden=hidden)
    assert hidden is not None
    torch.testing.assert_close(hidden, whole(**inputs))
    assert set(in_stages) == names, "names are those of the whole model, which checkpoints go by"
    assert len(in_stages) == len(names) + blocks.is_tied, "only a tied matrix is in two stages"


@pytest.mark.parametrize("model", MODELS)
def test_a_rank_with_two_stages_computes_what_the_whole_model_does(model: str) -> None:
    """Of three stages one rank has the first and the last, and another the one between."""
    whole, ends, between = (built(model) for _ in range(3))
    blocks, inputs = family_of(CONFIGS[model]).blocks(whole), rows_for(model)
    first, middle, last = stages_of(len(blocks.language_layers), 3, None, image_layers=blocks.image_layers)
    views = [ends.view(first), between.view(middle), ends.view(last)]
    ends.reduce_to(Stage.joined([first, last]))
    hidden: Tensor | None = None
    for number, view in enumerate(views):
        hidden = view(**(without_images(inputs) if number else inputs), hidden=hidden)
    assert hidden is not None
    torch.testing.assert_close(hidden, whole(**inputs))
    weights = dict(ends.named_parameters())
    assert weights.keys() < {name for name, _ in whole.named_parameters()}
    assert {id(one) for view in (views[0], views[2]) for one in view.parameters()} == set(map(id, weights.values()))


@given(st.integers(1, 40), st.integers(2, 9), st.integers(1, 4))
def test_a_schedule_gets_the_fewest_micro_batches_that_it_can_work_with(needed: int, ranks: int, virtual: int) -> None:
    passes = schedule_passes(needed, ranks, virtual)
    assert passes >= max(needed, ranks)
    if virtual == 1:
        assert passes == max(needed, ranks)
    else:
        assert passes % (passes // ranks) == 0, "what torch asks for"
        assert all(fewer % (fewer // ranks) for fewer in range(max(needed, ranks), passes))


def test_a_model_that_works_on_hidden_states_outside_of_its_layers_is_refused() -> None:
    """Each stage runs the whole model's code: a scale of embeddings, for one, would be applied by every stage."""
    module = built("llava")

    class Scaled(nn.Module):
        def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            hidden *= 2.0
            return self.rotary(hidden, position_ids)

    scaled = Scaled()
    scaled.rotary = module.language_model.rotary_emb
    module.language_model.rotary_emb = scaled
    with pytest.raises(ConfigError, match="'qwen2' cannot be split into pipeline stages"):
        module.reduce_to(Stage(range(1), is_first=True, is_last=False))


def test_a_model_whose_norm_has_another_name_is_refused() -> None:
    """LFM2's is `embedding_norm`."""
    module = built("llava")
    module.language_model.embedding_norm = module.language_model.norm
    del module.language_model.norm
    with pytest.raises(ConfigError, match="'qwen2' cannot be split into pipeline stages: its last norm"):
        module.reduce_to(Stage(range(1), is_first=True, is_last=False))


def built(name: str) -> nn.Module:
    """The training module with the same random weights each time, so large that attention tells places apart."""
    config = CONFIGS[name]
    family = family_of(config)
    torch.manual_seed(0)
    model = family.skeleton(config, vocabulary=VOCABULARY)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim < 2), std=0.2)
    if name.endswith("tied"):
        model.lm_head.weight = model.model.language_model.embed_tokens.weight
    return family.training_module(config, model, cached=False)


def rows_for(name: str) -> dict[str, Tensor]:
    """Two rows of two packed samples each, with images in them; a native model's other axes count otherwise."""
    inputs = {**inputs_of(CONFIGS[name], SequenceShape(2, 64, 2, 40), VOCABULARY, cached=False)}
    torch.manual_seed(1)
    places = torch.cat([torch.arange(40), torch.arange(24)]).expand_as(inputs["position_ids"]).clone()
    places[1:] = torch.randint_like(places[1:], 40) if places.ndim == 3 else places[1:]
    noise = torch.randn_like(inputs["images"])
    return inputs | {"position_ids": places, "images": noise, "label_index": torch.arange(0, 120, 3)}


def without_images(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a rank without the first stage reads."""
    return {name: tensor for name, tensor in inputs.items() if name != "image_grids"} | {"images": torch.empty(0)}
