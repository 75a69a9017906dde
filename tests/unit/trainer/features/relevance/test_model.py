"""A model that selects visual tokens, beside the stock model of its family."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.short_form import chosen
from tests.support.trainer.native_models import picture
from tests.support.trainer.native_sequences import config_of, tokenizer_of
from vlmpipe.trainer.config.arr_coc.channels import CHANNELS
from vlmpipe.trainer.config.model import GRID_FAMILIES, IMAGE_TOKEN, ModelConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.loader import PackedLoader, PackedSequence
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.dataloading.batches import PackedBatch, collate, online_images
from vlmpipe.trainer.features.relevance.generation import relevance_of_prompts
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.models.image_tokens import image_form_of, image_tokens_of
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.flops import flops_per_sequence

FAMILIES = sorted(GRID_FAMILIES)
SIZES = ((40, 24), (24, 56), (16, 16), (64, 32))  # 15, 21, 4 and 32 tokens
LENGTH = 160
FULL: dict[str, Any] = {"allocation": "full", "estimator": "none"}


class Split:
    """One image and one question a sample."""

    ids = [f"sample-{number}" for number in range(len(SIZES))]  # noqa: RUF012

    def __init__(self, config: ModelConfig, chat: Chat) -> None:
        self.counts = [image_tokens_of(config)(*size) for size in SIZES]
        encoded = [chat.encode(self.turns(n), [self.counts[n]], [SIZES[n]]) for n in range(len(SIZES))]
        self.tokens = np.array([len(one.input_ids) for one in encoded])

    def turns(self, number: int) -> list[Turn]:
        return [Turn(f"{IMAGE_TOKEN}\nwhat is {number}?", f" it is {number}{number}")]

    def image_token_counts(self, number: int) -> list[int]:
        return [self.counts[number]]

    def image_sizes(self, number: int) -> list[tuple[int, int]]:
        return [SIZES[number]]

    def image_sha256(self, number: int) -> list[str]:
        return [str(number)]

    def sample_location(self, number: int) -> int:
        return number


class Reader:
    """As `ShardReader`: turns and images of a sample."""

    def __init__(self, split: Split) -> None:
        self.turns = split.turns

    def images(self, number: int) -> list[bytes]:
        return [picture(number, SIZES[number])]


@dataclasses.dataclass
class Sampler:
    class Data:
        sequence_length = LENGTH

    data = Data()
    in_pairs = False
    prefixes = None


def built(family: str, relevance: dict[str, Any] | None, **changes: Any) -> tuple[ModelConfig, Any]:
    """A model with weights so large that attention tells tokens apart."""
    config = config_of(family, **{"freeze": (), "relevance": relevance} | changes)
    model = family_of(config).build(config, tokenizer_of(family)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.startswith("relevance."):
                weight.mul_(4 if weight.ndim > 1 else 1)
    return config, model


def rows_of(config: ModelConfig, groups: list[list[int]], seed: int = 7) -> list[PackedSequence]:
    chat = Chat(tokenizer_of(config.family), image_form_of(config))
    split = Split(config, chat)
    loader = PackedLoader(split, Sampler(), chat, Reader(split), images=True)  # type: ignore[arg-type]
    return [loader.pack_sequence(group, seed + number) for number, group in enumerate(groups)]


def batch_of(config: ModelConfig, groups: list[list[int]], seed: int = 7) -> PackedBatch:
    return collate(rows_of(config, groups, seed), online_images(image_preparer(config)))


def loss_of(config: ModelConfig, model: nn.Module, groups: list[list[int]], *, train: bool = False) -> Tensor:
    module = family_of(config).training_module(config, model, cached=False).train(train)
    return module(**batch_of(config, groups).to(torch.device("cpu")))


@pytest.mark.parametrize("family", FAMILIES)
def test_allocation_full_equals_the_stock_model_to_the_last_digit(family: str) -> None:
    """In logits of labels and gradients. Losses are summed by sample first, which rounds otherwise."""
    groups = [[0, 1], [2, 3]]
    (stock_config, stock), (config, model) = built(family, None), built(family, FULL)
    logits: list[Tensor] = []
    for each in (stock, model):
        each.lm_head.register_forward_hook(lambda _head, _inputs, output: logits.append(output))
    stock_loss, loss = loss_of(stock_config, stock, groups), loss_of(config, model, groups)
    assert len(logits) == 2 and torch.equal(*logits)
    assert torch.allclose(stock_loss, loss, rtol=1e-6)
    stock_loss.backward()
    loss.backward()
    of_stock = dict(stock.named_parameters())
    for name, parameter in model.named_parameters():
        if not name.startswith("relevance."):
            expected = of_stock[name].grad
            assert parameter.grad is None if expected is None else torch.equal(parameter.grad, expected), name


@pytest.mark.parametrize("allocation", ["topk", "mass", "quadtree", "uniform", "random"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_equals_its_samples_alone(family: str, allocation: str) -> None:
    """No score or selection depends on other samples, whose images keep other numbers of tokens."""
    config, model = built(family, {"allocation": allocation, "max_tokens": 9, "min_tokens": 2, "estimator": "none"})
    with torch.no_grad():
        together = loss_of(config, model, [[0, 1], [2, 3]])
        alone = sum(loss_of(config, model, [[number]]) for number in range(4))
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_tokens_have_the_positions_of_the_full_model(family: str) -> None:
    seen: list[dict[str, Tensor]] = []

    def look(_module: Any, _args: Any, given: dict[str, Tensor]) -> None:
        seen.append(given)

    config, model = built(family, {"allocation": "topk", "max_tokens": 5, "estimator": "none"})
    full_config, full = built(family, FULL)
    for one in (model, full):
        one.model.language_model.register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        loss_of(config, model, [[0, 1]])
        loss_of(full_config, full, [[0, 1]])
    kept, everything = seen
    place = -1
    for token in range(used_tokens(config)):  # each is found behind the one before: tokens keep their order
        place = next(
            n
            for n in range(place + 1, used_tokens(full_config))
            if torch.equal(everything["inputs_embeds"][0, n], kept["inputs_embeds"][0, token])
            and position(everything, n) == position(kept, token)
        )
    assert place == used_tokens(full_config) - 1
    assert used_tokens(config) == used_tokens(full_config) - (15 - 5) - (21 - 5)


def position(given: dict[str, Tensor], token: int) -> list[int]:
    return given["position_ids"][1:, 0, token].tolist()


def used_tokens(config: ModelConfig) -> int:
    return rows_of(config, [[0, 1]])[0].tokens


def test_the_question_is_read_without_the_answer() -> None:
    config = config_of("qwen3_vl", relevance={"max_tokens": 4})
    row = rows_of(config, [[0, 1]])[0]
    assert row.selectable is not None
    text = tokenizer_of("qwen3_vl").decode(row.input_ids[row.selectable.is_question])
    assert "what is 0?" in text and "what is 1?" in text
    assert "it is" not in text and "<|" not in text


def test_the_gradient_is_that_of_the_policy_alone() -> None:
    """With the base frozen nothing runs backward through the language model, and all of the module learns."""
    frozen = ("tower", "projector", "language_model")
    config = config_of("qwen3_vl", freeze=frozen, relevance={"max_tokens": 3})
    model = family_of(config).build(config, tokenizer_of("qwen3_vl"))
    loss = loss_of(config, model, [[0, 1], [2, 3]], train=True)
    loss.backward()
    assert {name for name, one in model.named_parameters() if one.grad is not None} == {
        f"relevance.{name}" for name, _ in model.relevance.named_parameters()
    }
    assert any(one.grad.any() for one in model.relevance.scorers.parameters())


def test_draws_are_those_of_the_seed() -> None:
    config = config_of("qwen3_vl", relevance={"max_tokens": 3})
    model = family_of(config).build(config, tokenizer_of("qwen3_vl"))
    module = family_of(config).training_module(config, model, cached=False).train()
    found = [module(**batch_of(config, [[0, 1]], seed).to(torch.device("cpu"))).item() for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_an_empty_sequence_gives_every_parameter_a_gradient() -> None:
    config = config_of("qwen3_vl", relevance={"max_tokens": 3})
    model = family_of(config).build(config, tokenizer_of("qwen3_vl"))
    loss_of(config, model, [[]], train=True).backward()
    assert all(one.grad is not None and not one.grad.any() for one in model.relevance.parameters())


@pytest.mark.parametrize("relevance", [FULL, {"max_tokens": 4}, {"allocation": "mass", "max_tokens": 12}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_keeps_what_training_keeps(family: str, relevance: dict[str, Any]) -> None:
    """Logits of the prompts' last tokens, padded on the left for `generate`, equal those of packed sequences."""
    config, model = built(family, relevance, freeze=("tower",))  # whose features are rounded to bf16 in both
    kind, chat = family_of(config), Chat(tokenizer_of(family), image_form_of(config))
    split, numbers = Split(config, chat), [0, 1, 3]
    module = kind.training_module(config, model, cached=False).eval()
    found: list[Tensor] = []
    module.token_loss.forward = lambda head, hidden, *_: found.append(head(hidden)) or torch.zeros(3)
    pixels = image_preparer(config)([picture(number, SIZES[number]) for number in numbers])
    with torch.no_grad():
        module(**batch_of(config, [[number] for number in numbers]).to(torch.device("cpu")))
        firsts = first_labels(config, numbers)
        features = torch.cat(list(kind.encode(config, kind.tower(model), pixels.values, pixels.grids)))
        prompts = [chat.prompt(split.turns(n)[0], [split.counts[n]], [SIZES[n]]) for n in numbers]
        longest = max(map(len, prompts))
        input_ids = torch.tensor([[chat.tokenizer.pad_token_id] * (longest - len(ids)) + ids for ids in prompts])
        projected = kind.project(model, features)
        given = kind.generation_inputs(model, input_ids, projected, torch.tensor(pixels.grids))
        logits = model(**given).logits[:, -1]
        generated = model.generate(**given, max_new_tokens=3, do_sample=False)
    torch.testing.assert_close(logits, found[0][firsts], rtol=1e-4, atol=1e-4)
    assert logits.std() > 0.1
    assert generated.shape[1] > given["input_ids"].shape[1]
    textures = projected[:, -len(CHANNELS) :]
    kept = [one.kept for one in relevance_of_prompts(model, input_ids, textures, torch.tensor(pixels.grids))]
    assert sum(map(len, kept)) == int((given["input_ids"] == model.config.image_token_id).sum())


def first_labels(config: ModelConfig, numbers: list[int]) -> list[int]:
    """Of each sample, the place of its first label among all."""
    counts = [rows_of(config, [[number]])[0].label_tokens for number in numbers]
    return [sum(counts[:place]) for place in range(len(counts))]


COSTS = {
    f"{how}-{family}": (family, freeze)
    for how, freeze in {"base frozen": ("tower", "projector", "language_model"), "all trained": ()}.items()
    for family in FAMILIES
}
COUNTED = chosen(COSTS, lambda name: name in (f"base frozen-{FAMILIES[0]}", f"all trained-{FAMILIES[-1]}"))


@pytest.mark.parametrize(("family", "freeze"), COUNTED.values(), ids=COUNTED)
def test_each_selection_costs_what_the_planner_counts(family: str, freeze: tuple[str, ...]) -> None:
    """Beside what one step computes whatever it draws. With a frozen base no pass goes backward."""
    counted, planned = [], []
    for samples in (2, 5):
        config, model = built(family, {"max_tokens": 4, "samples": samples}, freeze=freeze)
        for name, weight in model.named_parameters():
            weight.requires_grad_(not freeze or name.startswith("relevance."))
        # The CPU's fused attention kernel has no formula in torch's counter: it would count as nothing.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            loss_of(config, model, [[0, 1], [2, 3]], train=True).backward()
        counted.append(counter.get_total_flops())
        rows = rows_of(config, [[0, 1], [2, 3]])
        starts = [np.flatnonzero(np.append(row.position_ids[0] == 0, True)) for row in rows]  # of samples, then padding
        pairs = sum(int((np.diff(start)[:-1] ** 2).sum()) for start in starts)
        labels = int((torch.as_tensor(np.stack([row.labels for row in rows])) >= 0).sum())
        row = flops_per_sequence(
            family_of(config).shape(config), sequence_length=LENGTH, images=2, label_tokens=labels / 2,
            cached=False, activation_checkpointing="none", sample_pairs=pairs / 2,
        )  # fmt: skip
        planned.append(2 * row.total)
    assert counted[1] - counted[0] == pytest.approx(planned[1] - planned[0], rel=0.01)
