"""The relevance module: scores of an image's tokens for a question, and selections drawn from them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vlmpipe.trainer.config.arr_coc.relevance import LEARNING_SCORER, RelevanceConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.features.relevance.allocation import Kept, allocate, budget, selections_at, tokens_at, top
from vlmpipe.trainer.features.relevance.balancer import Balance, Balancer
from vlmpipe.trainer.features.relevance.scorers import Scorers

PREFIX = "relevance."  # of the module's weights in a model's state dict
FILE = "relevance.safetensors"  # in an export, beside the base's own files
BUDGET_NOISE = 0.5  # deviation of the budget's logit in drawn selections
MIN_DEVIATION = 0.05  # of the rewards, which are probabilities, that advantages are divided by


@dataclass(frozen=True, eq=False)
class Relevance:
    """Relevance of one image's tokens to one question."""

    scores: Tensor  # (scorers, tokens)
    relevance: Tensor  # (tokens,) in [0, 1]
    balance: Balance


@dataclass(frozen=True, eq=False)
class Draws:
    """Selections drawn for one image."""

    kept: list[Kept]  # `samples` of them
    log_probs: Tensor  # (samples,)


class RelevanceModule(nn.Module):
    """question_width: of the language model's embeddings. special_ids: tokens that belong to no question."""

    def __init__(self, config: RelevanceConfig, question_width: int, special_ids: Sequence[int]) -> None:
        super().__init__()
        self.config, self.question_width, self.special_ids = config, question_width, tuple(sorted(special_ids))
        self.scorers = Scorers(config, question_width)
        self.balancer = Balancer(config, question_width)
        # What all questions share is most of each of them, and can hide what differs: see question_centre.py.
        reads_question = LEARNING_SCORER in config.scorers or config.balancer == "adaptive"
        is_centred = config.centre_questions and reads_question
        self.question_centre = nn.Parameter(torch.zeros(question_width)) if is_centred else None

    def forward(self, textures: Tensor, question: Tensor) -> Relevance:
        """textures: (tokens, channels) of one image; question: (width,), see `pooled`. Computed in fp32."""
        with torch.autocast(textures.device.type, enabled=False):
            textures, question = textures.float(), self.centred(question.float())
            scores = self.scorers(textures, question)
            balance = self.balancer(scores, question)
            if not len(scores):
                return Relevance(scores, textures.new_full((len(textures),), 0.5), balance)
            return Relevance(scores, balance.weights @ scores, balance)

    def centred(self, question: Tensor) -> Tensor:
        """The question without what all questions share, at a root mean square of 1. question: (width,)."""
        return question if self.question_centre is None else scaled(question - self.question_centre)

    def select(self, relevance: Relevance, grid: tuple[int, int], question_ids: Sequence[int]) -> Kept:
        """Selection for the model outside of training. question_ids: decide what allocation random keeps."""
        seed = zlib.crc32(repr(list(question_ids)).encode()) if self.config.allocation == "random" else 0
        return allocate(self.config, relevance.relevance, relevance.balance, grid, seed)

    def draw(self, relevance: Relevance, grid: tuple[int, int], seed: int) -> Draws:
        """Selections for training: Gumbel noise on relevance, then the largest. A pure function of its arguments.

        The log probability of a selection is the sum of its tokens' log-softmax, a stand-in for that of drawing them
        one after the other. Where the number of tokens is chosen too, its density is added.
        """
        config, balance = self.config, relevance.balance
        scale = balance.temperature(config) * balance.noise(config)
        log_softmax = torch.log_softmax(relevance.relevance / scale, 0)
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(config.samples, len(relevance.relevance), generator=generator).to(log_softmax.device)
        gumbel = -torch.log(-torch.log(uniform.clamp(1e-9, 1 - 1e-7)))
        noise = torch.randn(config.samples, generator=generator).to(log_softmax.device) * BUDGET_NOISE
        noisy = log_softmax.detach() + gumbel
        if config.lower_bound == config.upper_bound or config.allocation == "mass":
            order = top(noisy, config.kept_of(len(log_softmax)))
            return Draws(selections_at(order, grid), log_softmax[order].sum(1))
        logit = torch.logit(balance.compress, 1e-6)
        selections, log_probs = [], []
        for number in range(config.samples):
            drawn = logit.detach() + noise[number]
            order = top(noisy[number], budget(config, torch.sigmoid(drawn), len(log_softmax)))
            density = (drawn - logit) ** 2 / (2 * BUDGET_NOISE**2)
            selections.append(tokens_at(order, grid))
            log_probs.append(log_softmax.index_select(0, order).sum() - density)
        return Draws(selections, torch.stack(log_probs))

    def idle(self) -> Tensor:
        """0, with a gradient of 0 for each parameter: a rank without images has gradients too."""
        zeros = [(parameter * 0).sum() for parameter in self.parameters()]
        return torch.stack(zeros).sum() if zeros else torch.zeros(())


def pooled(embeddings: Tensor, owners: Tensor, count: int) -> Tensor:
    """Mean embedding of each question, scaled to a root mean square of 1: (count, width) in fp32.

    embeddings: (tokens, width) of question tokens; owners: (tokens,) number of the question of each.
    """
    sums = embeddings.new_zeros(count, embeddings.shape[1], dtype=torch.float32)
    return scaled(sums.index_add(0, owners, embeddings.detach().float()))


def scaled(vectors: Tensor) -> Tensor:
    """(..., width) vectors at a root mean square of 1."""
    return vectors * torch.rsqrt(vectors.square().mean(-1, keepdim=True) + 1e-12)


def answer_probabilities(losses: Tensor, label_samples: Tensor, samples: int) -> Tensor:
    """The reward of each selection, (selections, samples): the mean probability of its answer's tokens, in [0, 1].

    losses: (selections, labels); label_samples: (labels,) sample of each. A log probability has no lower bound: a model
    that reads a wrong part of an image is surer of a wrong answer than one that sees nothing of it, and selections
    would learn to show nothing.
    """
    sums = losses.new_zeros(len(losses), samples).index_add(1, label_samples, torch.exp(-losses))
    labels = losses.new_zeros(samples).index_add(0, label_samples, torch.ones_like(losses[0]))
    return sums / labels.clamp(min=1)


def policy_loss(log_probs: Tensor, rewards: Tensor) -> Tensor:
    """REINFORCE with a leave-one-out baseline (RLOO), summed over samples. Both arguments: (selections, samples).

    A sample's advantages depend on its own selections only, and are divided by their rewards' deviation, or by
    MIN_DEVIATION where that is less: once all selections answer, what is left of differences would be noise.
    """
    if not rewards.numel():
        return log_probs.sum()
    others = (rewards.sum(0) - rewards) / (len(rewards) - 1)
    advantages = (rewards - others) / rewards.std(0).clamp(min=MIN_DEVIATION)
    return -(advantages.detach() * log_probs).mean(0).sum()


def save_relevance(module: RelevanceModule, read: Callable[[str], Tensor], folder: Path) -> None:
    """Write FILE: weights, read by their names in the whole model, and in its header all that rebuilds the module."""
    state = {name: read(PREFIX + name).contiguous() for name in module.state_dict()}
    header = {
        "relevance": module.config.model_dump_json(),
        "question_width": str(module.question_width),
        "special_ids": json.dumps(module.special_ids),
    }
    # safetensors refuses a file without tensors.
    save_file(state or {"none": torch.zeros(1)}, folder / FILE, header)


def load_relevance(file: Path) -> RelevanceModule:
    """The module of an export's FILE. Raises ConfigError for another file."""
    with safe_open(file, framework="pt") as stored:
        header = stored.metadata() or {}
        if "relevance" not in header:
            raise ConfigError(f"{file} holds no relevance module", expected="a file that an export wrote")
        config = RelevanceConfig.model_validate_json(header["relevance"])
        module = RelevanceModule(config, int(header["question_width"]), json.loads(header["special_ids"]))
        module.load_state_dict({name: stored.get_tensor(name) for name in module.state_dict()})
    return module


def untrained(module: RelevanceModule, seed: int) -> RelevanceModule:
    """A module of the same settings with its first weights, as `seed` draws them."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return RelevanceModule(module.config, module.question_width, module.special_ids).float()
