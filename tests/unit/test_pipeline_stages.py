"""Where a model is cut into pipeline stages, and what a stage keeps of it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.flop_cases import model_config
from trainer.errors import ConfigError
from trainer.models.family import Stage
from trainer.models.llava import LlavaFamily
from trainer.models.square_stage import reduce_to_stage, stage_view
from trainer.strategies.pipeline_stages import Costs, cut, end_costs, schedule_passes, stages_of
from trainer.trace_rows import RowShape, inputs_of

VOCABULARY = 300


@given(
    layers=st.integers(2, 9),
    stages=st.integers(2, 4),
    costs=st.builds(Costs, st.integers(0, 60), st.integers(1, 20), st.integers(0, 60)),
)
def test_no_cut_has_a_cheaper_fullest_stage(layers: int, stages: int, costs: Costs) -> None:
    def fullest(counts: tuple[int, ...]) -> float:
        return max(end + count * costs.layer for end, count in zip(end_costs(stages, costs), counts, strict=True))

    found = cut(layers, stages, costs)
    assert [number for stage in found for number in stage.layers] == list(range(layers))
    assert [stage.is_first for stage in found] == [True] + [False] * (stages - 1)
    assert [stage.is_last for stage in found] == [False] * (stages - 1) + [True]
    every = (counts for counts in itertools.product(range(layers + 1), repeat=stages) if sum(counts) == layers)
    assert fullest(tuple(len(stage.layers) for stage in found)) == min(map(fullest, every))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 stages .* are more than the language model's 2 layers"):
        stages_of(2, 3, None)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_one_after_another_compute_what_the_whole_model_does(tied: bool) -> None:
    whole = built(tied)
    layers = len(whole.model.model.language_model.layers)
    inputs = {**inputs_of(model_config(), RowShape(2, 64, 1, 40), VOCABULARY, cached=False)}
    inputs["position_ids"] = torch.cat([torch.arange(40), torch.arange(24)]).repeat(2, 1)  # two packed samples
    names = {name for name, _ in whole.named_parameters()}
    hidden: Tensor | None = None
    in_stages: list[str] = []
    for stage in cut(layers, 2, Costs(0, 1, 0)):
        module = built(tied)
        reduce_to_stage(module, stage)
        in_stages += [name for name, _ in module.named_parameters()]
        hidden = module(**inputs, hidden=hidden)
    assert hidden is not None
    torch.testing.assert_close(hidden, whole(**inputs))
    assert set(in_stages) == names, "names are those of the whole model, which checkpoints go by"
    assert len(in_stages) == len(names) + tied, "only a tied matrix is in two stages"


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_with_two_stages_computes_what_the_whole_model_does(tied: bool) -> None:
    """Of three stages one rank has the first and the last, and another the one between."""
    whole, ends, between = (built(tied) for _ in range(3))
    layers = len(whole.language_model.layers)
    first, middle, last = cut(layers, 3, Costs(0, 1, 0))
    views = [stage_view(ends, first), stage_view(between, middle), stage_view(ends, last)]
    reduce_to_stage(ends, Stage.joined([first, last]))
    inputs = inputs_of(model_config(), RowShape(2, 64, 1, 40), VOCABULARY, cached=False)
    hidden: Tensor | None = None
    for view in views:
        hidden = view(**inputs, hidden=hidden)
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
    module = built(tied=False)

    class Scaled(nn.Module):
        def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            hidden *= 2.0
            return self.rotary(hidden, position_ids)

    scaled = Scaled()
    scaled.rotary = module.language_model.rotary_emb
    module.language_model.rotary_emb = scaled
    with pytest.raises(ConfigError, match="'qwen2' cannot be cut into pipeline stages"):
        reduce_to_stage(module, Stage(range(1), is_first=True, is_last=False))


def built(tied: bool) -> nn.Module:
    """The training module with the same random weights each time."""
    family, config = LlavaFamily(), model_config()
    torch.manual_seed(0)
    model = family.skeleton(config, vocabulary=VOCABULARY)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    if tied:
        model.lm_head.weight = model.model.language_model.embed_tokens.weight
    return family.training_module(config, model, cached=False)
