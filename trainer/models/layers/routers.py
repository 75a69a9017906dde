"""Routers of a mixture of experts, and the library's loss that balances them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor, nn

RECORDED = "_can_record_outputs"  # of transformers' models: what of which modules makes up their outputs
ROUTER_LOGITS, BALANCING_LOSS = "router_logits", "load_balancing_loss_func"


@dataclass(frozen=True)
class Router:
    """A router. index: of the logits among its outputs."""

    module: nn.Module
    index: int

    def logits(self, output: object) -> Tensor:
        logits = output[self.index] if isinstance(output, tuple | list) else output
        assert isinstance(logits, Tensor)
        return logits


def routers_of(layers: Iterable[nn.Module]) -> list[Router]:
    """Routers whose logits transformers records, in the order of the layers; those that say how many experts they have,
    and how many a token goes to."""
    routers = []
    for layer in layers:
        recorded = dict(_recorded(_code_of(layer)))
        for module in layer.modules():
            if type(module) in recorded and hasattr(module, "num_experts") and hasattr(module, "top_k"):
                routers.append(Router(module, recorded[type(module)]))
    return routers


def balancing_loss_of(layers: Iterable[nn.Module]) -> Callable[..., Tensor] | None:
    """The library's loss of router logits, number of experts, experts of a token, and mask; None if it has none."""
    codes = map(_code_of, layers)
    return getattr(next(codes, None), BALANCING_LOSS, None)


def _code_of(layer: nn.Module) -> ModuleType:
    return sys.modules[type(layer).__module__]


def _recorded(code: ModuleType) -> Iterator[tuple[type, int]]:
    for kind in vars(code).values():
        outputs = getattr(kind, RECORDED, None) if isinstance(kind, type) else None
        recorder = outputs.get(ROUTER_LOGITS) if isinstance(outputs, dict) else None
        target = getattr(recorder, "target_class", recorder)
        if isinstance(target, type):
            yield target, int(getattr(recorder, "index", 0))
