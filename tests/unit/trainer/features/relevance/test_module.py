"""Scores, tensions, drawn selections and their gradient, and the module's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vlmpipe.trainer.config.arr_coc.channels import CHANNELS
from vlmpipe.trainer.config.arr_coc.relevance import REWARD, RelevanceConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.features.relevance.module import (
    PREFIX,
    RelevanceModule,
    answer_probabilities,
    load_relevance,
    policy_loss,
    pooled,
    save_relevance,
)

WIDTH, GRID = 12, (4, 5)
TEXTURES = torch.rand(20, len(CHANNELS), generator=torch.Generator().manual_seed(1))
QUESTION = torch.randn(WIDTH, generator=torch.Generator().manual_seed(2))


def module_of(**settings: Any) -> RelevanceModule:
    torch.manual_seed(0)
    return RelevanceModule(RelevanceConfig.model_validate({"max_tokens": 4, **settings}), WIDTH, [0, 1])


@pytest.mark.parametrize(
    ("scorers", "count"),
    [(["propositional"], 1), (["perspectival", "participatory"], 2)],
)
def test_relevance_is_the_weighted_sum_of_scores(scorers: list[str], count: int) -> None:
    found = module_of(scorers=scorers)(TEXTURES, QUESTION)
    assert found.scores.shape == (count, 20) and float(found.balance.weights.detach().sum()) == pytest.approx(1)
    torch.testing.assert_close(found.relevance, found.scores.mean(0))  # the balancer starts neutral
    assert ((found.relevance >= 0) & (found.relevance <= 1)).all()


def test_parameters_at_width_2048_are_those_of_the_plan() -> None:
    module = RelevanceModule(RelevanceConfig(max_tokens=4), 2048, [])
    assert sum(one.numel() for one in module.parameters()) < 450_000


def test_textures_that_do_not_count_change_nothing() -> None:
    module, changed = module_of(scorers=["participatory"], channels=["rgb"]), TEXTURES.clone()
    changed[:, CHANNELS.index("entropy")] += 1
    assert torch.equal(module(TEXTURES, QUESTION).relevance, module(changed, QUESTION).relevance)
    changed[3, CHANNELS.index("red")] += 1
    assert (module(TEXTURES, QUESTION).relevance != module(changed, QUESTION).relevance).nonzero().tolist() == [[3]]


def test_the_question_decides() -> None:
    module = module_of()
    assert not torch.equal(module(TEXTURES, QUESTION).relevance, module(TEXTURES, -QUESTION).relevance)


def test_questions_are_means_of_their_own_tokens() -> None:
    embeddings, owners = torch.randn(5, WIDTH), torch.tensor([0, 0, 2, 2, 2])
    found = pooled(embeddings, owners, 3)
    expected = embeddings[:2].mean(0)
    torch.testing.assert_close(found[0], expected / expected.square().mean().sqrt())
    assert not found[1].any()


def test_draws_are_a_pure_function_with_the_log_probability_of_their_tokens() -> None:
    module = module_of(samples=6)
    found = module(TEXTURES, QUESTION)
    draws, again = module.draw(found, GRID, 5), module.draw(found, GRID, 5)
    assert [kept.index.tolist() for kept in draws.kept] == [kept.index.tolist() for kept in again.kept]
    assert len({tuple(kept.index.tolist()) for kept in draws.kept}) > 1
    scale = found.balance.temperature(module.config) * found.balance.noise(module.config)
    log_softmax = torch.log_softmax(found.relevance / scale, 0)
    for kept, log_prob in zip(draws.kept, draws.log_probs, strict=True):
        torch.testing.assert_close(log_prob, log_softmax[kept.index].sum())


def test_gumbel_draws_have_the_softmax_of_relevance() -> None:
    module = module_of(samples=4000, max_tokens=1, temperature=0.3)
    found = module(TEXTURES, QUESTION)
    drawn = torch.bincount(torch.cat([kept.index for kept in module.draw(found, GRID, 0).kept]), minlength=20) / 4000
    torch.testing.assert_close(drawn, torch.softmax(found.relevance / 0.3, 0), atol=0.025, rtol=0)


def test_a_chosen_budget_is_learned() -> None:
    """Where fewer tokens are as good, their cost moves the tension towards fewer."""
    module = module_of(samples=16, min_tokens=2, max_tokens=12)
    optimizer = torch.optim.Adam(module.parameters(), 0.01)

    def lengths(seed: int) -> Tensor:
        found = module(TEXTURES, QUESTION)
        draws = module.draw(found, GRID, seed)
        counts = torch.tensor([float(len(kept)) for kept in draws.kept])
        optimizer.zero_grad()
        policy_loss(draws.log_probs[:, None], -counts[:, None]).backward()
        optimizer.step()
        return counts

    first = lengths(0).mean()
    for step in range(1, 40):
        last = lengths(step).mean()
    assert first > 6 and last < 4
    assert module(TEXTURES, QUESTION).balance.compress > 0.7


def test_advantages_are_left_one_out_and_do_not_depend_on_other_samples() -> None:
    rewards = torch.tensor([[-1.0, 5.0], [-2.0, 5.0], [-6.0, 5.0]])
    log_probs = torch.zeros(3, 2, requires_grad=True)
    policy_loss(log_probs, rewards).backward()
    advantages = torch.tensor([-1 + 4.0, -2 + 3.5, -6 + 1.5]) / rewards[:, 0].std()
    torch.testing.assert_close(log_probs.grad, torch.stack([-advantages / 3, torch.zeros(3)], dim=1))


def test_a_reward_is_what_checkpoints_record_it_as() -> None:
    assert REWARD == "the mean probability of an answer's tokens", "with another reward it needs another name"
    losses = torch.tensor([[0.0, 2.0, 200.0], [1.0, 1.0, 0.0]])
    rewards = answer_probabilities(losses, torch.tensor([0, 0, 1]), 3)  # the third sample has no label
    shares = torch.exp(-losses)
    torch.testing.assert_close(rewards, torch.stack([shares[:, :2].mean(1), shares[:, 2], torch.zeros(2)], 1))


def test_a_model_that_is_surer_of_wrong_answers_than_of_none_does_not_teach_to_look_away() -> None:
    """Six of 36 tokens say something, one of them what a question asks; four are drawn.

    The losses are those of the base of configs/arr-coc.yaml from seed 4. With log probabilities as rewards the gradient
    points away from the six.
    """
    samples, generator = 4000, torch.Generator().manual_seed(0)
    kept = torch.rand(4, samples, 36, generator=generator).topk(4, dim=2).indices
    says, answers = kept < 6, kept == (torch.arange(samples) % 6)[None, :, None]
    losses = torch.where(answers.any(2), 0.2, torch.where(says.any(2), 7.1, 4.2))
    score = torch.zeros((), requires_grad=True)  # of all tokens that say something
    policy_loss(score * says.sum(2), answer_probabilities(losses, torch.arange(samples), samples)).backward()
    assert score.grad is not None and score.grad < 0


def test_the_file_rebuilds_the_module(tmp_path: Path) -> None:
    module = module_of(channels=["rgb_lab"], balancer="fixed")
    save_relevance(module, lambda name: module.state_dict()[name.removeprefix(PREFIX)], tmp_path)
    again = load_relevance(tmp_path / "relevance.safetensors")
    assert again.config == module.config and again.special_ids == (0, 1)
    assert torch.equal(again(TEXTURES, QUESTION).relevance, module(TEXTURES, QUESTION).relevance)


def test_another_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"one": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="holds no relevance module"):
        load_relevance(tmp_path / "other.safetensors")
