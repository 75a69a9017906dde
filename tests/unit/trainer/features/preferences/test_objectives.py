"""The loss of pairs against the published formula, computed conversation by conversation."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.trainer.flop_cases import model_config
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.data.chat.encode import IGNORED
from vlmpipe.trainer.data.loader import PackedSequence
from vlmpipe.trainer.dataloading.batches import collate, image_layouts
from vlmpipe.trainer.features.preferences.objectives import dpo_loss, pair_loss_of, simpo_loss
from vlmpipe.trainer.models.loss.chunked_loss import compute_in_chunks
from vlmpipe.trainer.models.loss.pairs import PreferencePairs
from vlmpipe.trainer.models.registry import family_of

BETA, ROW_TOKENS = 0.3, 40
NO_IMAGES = image_layouts(model_config())
# Tokens of the question, of the chosen and of the rejected answer of each pair; two packed sequences.
ROWS = [[(5, 3, 2), (4, 1, 6)], [(9, 2, 2)]]
REFERENCES = np.array([-20.0, -13.5, -7.25, -36.0, -14.0, -11.0], np.float32)
Conversation = tuple[list[int], int]  # tokens, and how many of them are the question


def conversations() -> list[list[list[Conversation]]]:
    """Of each packed sequence, the two of each pair."""
    draw = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return draw.integers(4, 250, count).tolist()

    return [
        [[(question + tokens(size), asked) for size in (chosen, rejected)]
         for asked, chosen, rejected in row for question in [tokens(asked)]]
        for row in ROWS
    ]  # fmt: skip


def packed(row: list[list[Conversation]], references: np.ndarray[Any, Any] | None) -> PackedSequence:
    ids, labels = np.zeros(ROW_TOKENS, np.int64), np.full(ROW_TOKENS, IGNORED, np.int64)
    positions, lengths, start = np.arange(ROW_TOKENS), [], 0
    for tokens, asked in itertools.chain.from_iterable(row):
        stop = start + len(tokens)
        ids[start:stop], labels[start + asked : stop] = tokens, tokens[asked:]
        positions[start:stop] = np.arange(len(tokens))
        lengths.append(len(tokens))
        start = stop
    positions[start:] = np.arange(ROW_TOKENS - start)
    unknown = np.full(len(lengths), np.nan, np.float32)
    return PackedSequence(
        input_ids=ids, labels=labels, position_ids=positions, image_sha256=(), image_sizes=(), image_token_counts=(),
        shown=0, sample_images=(0,) * len(row), images=(), sample_ids=tuple(map(str, range(len(row)))),
        sample_tokens=tuple(lengths),
        label_tokens=int((labels != IGNORED).sum()), references=unknown if references is None else references,
    )  # fmt: skip


def module_of() -> nn.Module:
    config = model_config(freeze=())
    torch.manual_seed(0)
    model = family_of(config).skeleton(config, vocabulary=300)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    module = family_of(config).training_module(config, model, cached=True)
    module.project = lambda features: features.new_zeros(0, 64)  # no sample has an image
    module.token_loss.pair_loss = partial(dpo_loss, beta=BETA)
    return module.train()


def log_probability(module: nn.Module, tokens: list[int], asked: int) -> torch.Tensor:
    """Of the answer in a conversation that is alone, from all logits."""
    logits = module.model(input_ids=torch.tensor([tokens])).logits[0].double()
    scores = logits.log_softmax(-1)[asked - 1 : -1]
    return scores.gather(1, torch.tensor(tokens[asked:])[:, None]).sum()


def test_the_loss_and_its_gradients_are_those_of_the_published_formula() -> None:
    """-log sigmoid(beta * (log(p/ref) of the chosen answer - log(p/ref) of the rejected one)): equation 7 of the paper,
    and TRL's loss_type sigmoid."""
    module, pairs = module_of(), conversations()
    expected = torch.zeros((), dtype=torch.float64)
    for (chosen, rejected), references in zip(
        itertools.chain.from_iterable(pairs), REFERENCES.reshape(-1, 2).tolist(), strict=True
    ):
        of_chosen = log_probability(module, *chosen) - references[0]
        of_rejected = log_probability(module, *rejected) - references[1]
        expected = expected - torch.log(1 / (1 + torch.exp(-BETA * (of_chosen - of_rejected))))
    expected.backward()
    gradients = {name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None}
    module.zero_grad()

    batch = collate([packed(pairs[0], REFERENCES[:4]), packed(pairs[1], REFERENCES[4:])], NO_IMAGES)
    loss = module(**batch.to(torch.device("cpu")))
    loss.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(module.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_simpo_is_the_published_formula_and_asks_for_no_reference() -> None:
    """-log sigmoid(beta / |chosen| * log p(chosen) - beta / |rejected| * log p(rejected) - gamma): equation 6 of the
    paper, and TRL's loss_type simpo with cpo_alpha 0."""
    module, pairs, beta, gamma = module_of(), conversations(), 2.5, 0.75
    needed = {"global_batch_size": 1, "optimizer": {"learning_rate": 1e-3}}
    train = TrainConfig.model_validate(needed | {"objective": "simpo", "simpo_beta": beta, "simpo_gamma": gamma})
    module.token_loss.pair_loss = pair_loss_of(train)
    expected = torch.zeros((), dtype=torch.float64)
    for chosen, rejected in itertools.chain.from_iterable(pairs):
        means = [log_probability(module, ids, asked) / (len(ids) - asked) for ids, asked in (chosen, rejected)]
        expected = expected + torch.log(1 + torch.exp(gamma - beta * means[0] + beta * means[1]))
    expected.backward()
    gradients = {name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None}
    module.zero_grad()
    for references in (np.zeros(6, np.float32), REFERENCES):
        batch = collate([packed(pairs[0], references[:4]), packed(pairs[1], references[4:])], NO_IMAGES)
        loss = module(**batch.to(torch.device("cpu")))
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    loss.backward()
    for name, gradient in gradients.items():
        torch.testing.assert_close(module.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_simpo_does_not_prefer_the_longer_of_two_equally_likely_answers() -> None:
    """Token by token: the reward is a mean, so only gamma is left of the loss."""
    pairs = PreferencePairs(torch.tensor([0, 0, 0, 1]), 2, torch.zeros(2))
    loss = simpo_loss(torch.full((4,), 1.5), pairs, beta=2.0, gamma=0.5)
    assert float(loss) == pytest.approx(math.log(1 + math.exp(0.5)))


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_chunks_of_labels_change_neither_loss_nor_gradients(chunk: int) -> None:
    pairs, found = conversations(), []
    for size in (0, chunk):
        module = module_of()
        if size:
            compute_in_chunks(module.token_loss, module.model.lm_head, size)
        batch = collate([packed(pairs[0], REFERENCES[:4]), packed(pairs[1], REFERENCES[4:])], NO_IMAGES)
        loss = module(**batch.to(torch.device("cpu")))
        loss.backward()
        found.append(
            (loss.detach(), module.model.lm_head.weight.grad, module.model.model.language_model.norm.weight.grad)
        )
    for expected, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, expected, rtol=1e-5, atol=1e-6)


def test_without_references_the_log_probabilities_are_given() -> None:
    """Also where a packed sequence of the batch is empty."""
    module, pairs = module_of(), conversations()
    batch = collate([packed(pairs[0], None), packed([], None)], NO_IMAGES)
    assert batch.pairs is not None and batch.pairs.references is None
    expected = [log_probability(module, *one) for one in itertools.chain.from_iterable(pairs[0])]
    torch.testing.assert_close(
        module(**batch.to(torch.device("cpu"))).double(), torch.stack(expected), rtol=1e-5, atol=1e-5
    )


def test_a_batch_without_pairs_gives_no_loss_and_no_gradient() -> None:
    module = module_of()
    batch = collate([packed([], np.empty(0, np.float32))], NO_IMAGES)
    loss = module(**batch.to(torch.device("cpu")))
    loss.backward()
    assert float(loss) == 0
    assert not any(weight.grad.any() for weight in module.parameters() if weight.grad is not None)


def test_references_stay_in_fp32_whatever_a_strategy_casts() -> None:
    batch = collate([packed(conversations()[0], REFERENCES[:4])], NO_IMAGES)
    assert not isinstance(batch.pairs, tuple | list | dict)
    assert replace(batch).to(torch.device("cpu"))["pairs"].references.dtype == torch.float32
