"""Balances experts by the library's own loss of router logits, beside that of labels (`train.router_loss`).

Routers see tokens of padding, which must not vote: bounds of samples come with the call of the first language layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.hooks.feature import Feature, Layers
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.layers.routers import Router, balancing_loss_of, routers_of


class RouterBalance(Feature):
    """Adds the loss of routers to that of labels, in training only."""

    def change_layers(self, train: TrainConfig, layers: Layers, device: torch.device) -> str:
        count = len(routers_of(layers.language_layers))
        return f"router loss x {train.router_loss:g} on {count} routers, part of the training loss"

    def added_loss(self, train: TrainConfig, layers: Layers) -> Callable[[int], Tensor]:
        return Balance(list(layers.language_layers), train.router_loss).loss


class Balance:
    """Router logits of one forward pass at a time, and their loss.

    Raises ConfigError for a model without such routers.
    """

    def __init__(self, layers: list[nn.Module], coefficient: float) -> None:
        self.routers = routers_of(layers)
        function = balancing_loss_of(layers)
        if not self.routers or function is None:
            raise ConfigError(
                "train.router_loss is set, and transformers has no loss that balances routers of this model",
                expected="a mixture of experts with such a loss, as Qwen3-VL's and Qwen3.5's",
                fix="leave train.router_loss out",
            )
        self._function, self._coefficient = function, coefficient
        self._logits: list[Tensor] | None = None
        self._samples: CuSeqlens | None = None
        layers[0].register_forward_pre_hook(self._start, with_kwargs=True)
        for router in self.routers:
            router.module.register_forward_hook(self._note(router))

    def loss(self, terms: int) -> Tensor:
        """The loss of the pass that has just run, times the number of its labels: sums are divided by it later."""
        assert self._logits is not None, "the language layers run before the loss"
        logits, self._logits = self._logits, None
        if not terms:  # such as of padding alone, whose mean over no token would be NaN; all ranks get gradients
            return torch.stack([layer_logits.sum() for layer_logits in logits]).sum().float() * 0.0
        first = self.routers[0].module
        mask = _is_sample(self._samples, len(logits[0]), logits[0].device)
        balanced: Tensor = self._function(tuple(logits), first.num_experts, first.top_k, mask)
        return self._coefficient * terms * balanced

    def _start(self, layer: nn.Module, _args: object, inputs: dict[str, object]) -> None:
        if not layer.training or _is_backward():
            return
        samples = inputs.get("samples")
        assert samples is None or isinstance(samples, CuSeqlens)
        self._logits, self._samples = [], samples

    def _note(self, router: Router) -> object:
        @torch.compiler.disable  # a list that grows
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            if self._logits is not None and not _is_backward():
                self._logits.append(router.logits(output).flatten(0, -2))

        return hook


def _is_backward() -> bool:
    """Return whether layers are recomputed."""
    return bool(torch._C._current_graph_task_id() != -1)


def _is_sample(samples: CuSeqlens | None, tokens: int, device: torch.device) -> Tensor | None:
    """(1, tokens), 0 where padding is; None without padding."""
    if samples is None or not samples.packed:
        return None
    steps = torch.zeros(tokens + 1)
    steps.index_add_(0, samples.bounds[:, 0].long(), torch.ones(len(samples.bounds)))
    steps.index_add_(0, samples.bounds[:, 1].long(), -torch.ones(len(samples.bounds)))
    return steps.cumsum(0)[None, :-1].to(device, non_blocking=True)


FEATURE = RouterBalance()
