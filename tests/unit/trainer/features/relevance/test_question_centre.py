"""The mean question that a relevance module begins with, where it is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vlmpipe.trainer.config.arr_coc.channels import CHANNELS
from vlmpipe.trainer.config.arr_coc.relevance import RelevanceConfig
from vlmpipe.trainer.features.relevance.module import RelevanceModule, pooled, scaled
from vlmpipe.trainer.features.relevance.question_centre import NAME, centre_questions, lacks_centre, mean_question

WIDTH = 12
# Two packed sequences of two samples and one; 7 marks the tokens of questions.
SEQUENCES: Any = [
    SimpleNamespace(
        input_ids=np.array([1, 7, 3, 7, 2, 4, 0, 0]),
        sample_tokens=(3, 3),
        selectable=SimpleNamespace(is_question=np.array([0, 1, 1, 0, 1, 1, 0, 0], bool)),
    ),
    SimpleNamespace(
        input_ids=np.array([5, 6, 1, 0]), sample_tokens=(3,),
        selectable=SimpleNamespace(is_question=np.array([1, 1, 0, 0], bool)),
    ),
    SimpleNamespace(input_ids=np.array([5, 6]), sample_tokens=(2,), selectable=None),
]  # fmt: skip
QUESTIONS = [[7, 3], [2, 4], [5, 6]]


class Model(nn.Module):
    """As much of a language model as has embeddings and a relevance module."""

    def __init__(self, *, is_centred: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = nn.Embedding(8, WIDTH)
        self.relevance = RelevanceModule(RelevanceConfig(max_tokens=4, centre_questions=is_centred), WIDTH, [0, 1])

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings


def expected(table: Tensor) -> Tensor:
    means = [pooled(table[torch.tensor(ids)], torch.zeros(len(ids), dtype=torch.int64), 1)[0] for ids in QUESTIONS]
    return torch.stack(means).mean(0)


def test_it_is_the_mean_of_the_questions_as_the_module_sees_them() -> None:
    table = torch.randn(8, WIDTH)
    torch.testing.assert_close(mean_question(table, SEQUENCES), expected(table))
    assert not mean_question(table, SEQUENCES[2:]).any()


def test_a_module_begins_with_it_once_and_only_where_it_is_asked_for() -> None:
    assert not lacks_centre(Model(is_centred=False), None)
    assert NAME not in dict(Model(is_centred=False).named_parameters())
    model = Model(is_centred=True)
    assert lacks_centre(model, None)
    assert centre_questions(model, None, SEQUENCES) is None
    torch.testing.assert_close(model.get_parameter(NAME).detach(), expected(model.embeddings.weight.detach()))
    assert not lacks_centre(model, None)  # one that is trained further keeps its own
    model.relevance.requires_grad_(False)
    model.get_parameter(NAME).detach().zero_()
    assert not lacks_centre(model, None)


def test_weights_that_are_read_later_hold_it_too() -> None:
    model = Model(is_centred=True)
    stored = {name: one.detach().clone() for name, one in model.named_parameters()}
    deferred: Any = SimpleNamespace(read=stored.__getitem__)
    assert lacks_centre(model, deferred)
    found = centre_questions(model, deferred, SEQUENCES)
    assert found
    torch.testing.assert_close(found.read(NAME), expected(stored["embeddings.weight"]))
    assert found.read("embeddings.weight") is stored["embeddings.weight"]
    assert not lacks_centre(model, found)
    assert not model.get_parameter(NAME).any()  # it has no memory of its own yet


def test_questions_are_seen_from_it() -> None:
    module = Model(is_centred=True).relevance
    question, textures = torch.randn(WIDTH), torch.rand(20, len(CHANNELS))
    centre = torch.randn(WIDTH)
    module.question_centre.data.copy_(centre)
    torch.testing.assert_close(module.centred(question), scaled(question - centre))
    before = module(textures, question).relevance
    module.question_centre.data.zero_()
    assert not torch.equal(module(textures, question).relevance, before)
