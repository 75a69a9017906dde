"""Selective activation checkpointing: saves matrix products and attention, and recomputes the rest of a layer."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor
from torch._C import DispatchKeySet
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from vlmpipe.trainer.models.attention.attend import ATTEND

ATEN = torch.ops.aten
# Operations whose results are saved. Modules with operations of their own that multiply matrices add these.
PRODUCTS: list[OpOverload] = [
    ATEN.mm.default,
    ATEN.addmm.default,
    ATEN.bmm.default,
    ATEN._scaled_mm.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATTEND,
]
# Below autograd, above the kernels of all devices, and of none of these operations.
KEY = torch._C.DispatchKey.BackendSelect
BELOW = torch._C._dispatch_keyset_full_after(KEY)
_LIBRARIES: dict[OpOverload, torch.library.Library] = {}  # a library that is collected takes its kernels along
_ACTIVE = threading.local()  # `pass_`: of the layer that this thread runs


def save_products() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """The contexts of a layer's forward pass and of its recomputation.

    Each of torch's modes calls Python for every operation of the layer; kernels in front of the products' own do so for
    products only. Where other modes are active, of traces, counters and compilers, they must see what is computed.
    """
    if torch._C._len_torch_dispatch_stack():
        forward, recomputation = create_selective_checkpoint_contexts(PRODUCTS)
        return forward, Reuse(recomputation)
    for product in PRODUCTS:
        if product not in _LIBRARIES:
            _LIBRARIES[product] = _in_front_of(product)
    results: Results = defaultdict(list)
    return Forward(results), Recomputation(results)


class Reuse(TorchDispatchMode):
    """Recomputes a layer; products are found by `mode`, the second of torch's `create_selective_checkpoint_contexts`.

    That mode alone expects the operations of the forward pass, all of them. But ZeRO-3 gathers weights in hooks of a
    layer's modules, or before the layer: some in one pass, others in the other.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func in PRODUCTS:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


Kind = TypeVar("Kind")
Results = defaultdict[OpOverload, list[object]]  # of each product, in the order of its calls; None once reused


class Paused:
    """No layer's pass."""

    def __enter__(self) -> None:
        self._outer, _ACTIVE.pass_ = getattr(_ACTIVE, "pass_", None), self._inner()

    def __exit__(self, *_: object) -> None:
        _ACTIVE.pass_ = self._outer

    def _inner(self) -> Forward | None:
        return None


class Forward(Paused):
    """A layer's forward pass."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def _inner(self) -> Forward:
        return self

    def result_of(
        self, product: OpOverload, keys: DispatchKeySet, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        with Paused():  # a product may be made of others
            result = product.redispatch(keys & BELOW, *args, **kwargs)
        self._results[product].append(each_of(result, Tensor, Saved))
        return result


class Recomputation(Forward):
    """Recomputation of a layer, which finds the products."""

    def __enter__(self) -> None:
        super().__enter__()
        self._calls: defaultdict[OpOverload, int] = defaultdict(int)

    def result_of(self, product: OpOverload, keys: DispatchKeySet, args: object, kwargs: object) -> object:
        results, call = self._results[product], self._calls[product]
        self._calls[product] += 1
        if call >= len(results) or results[call] is None:
            raise RuntimeError(
                f"a layer is recomputed with call {call + 1} of {product}, of which its forward pass left no result: "
                "its operations must not differ between the passes, and one forward pass serves one backward pass"
            )
        result, results[call] = results[call], None
        return each_of(result, Saved, Saved.unchanged)


class Saved:
    """A result outside of the graph, in the same memory."""

    def __init__(self, result: Tensor) -> None:
        # With this key a detached tensor counts the changes of the original, too.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._result = result.detach()
        self._version = self._result._version

    def unchanged(self) -> Tensor:
        """Raises RuntimeError when the result was changed in place since."""
        if self._result._version != self._version:
            raise RuntimeError("the result of a product that checkpointing saves was changed in place")
        return self._result


def each_of(result: object, kind: type[Kind], change: Callable[[Kind], object]) -> object:
    """Return a product's result, with `change` applied to everything of this kind."""
    if isinstance(result, tuple):
        return tuple(change(part) if isinstance(part, kind) else part for part in result)
    return change(result) if isinstance(result, kind) else result


def _in_front_of(product: OpOverload) -> torch.library.Library:
    def kernel(keys: DispatchKeySet, *args: object, **kwargs: object) -> object:
        if active := getattr(_ACTIVE, "pass_", None):
            return active.result_of(product, keys, args, kwargs)
        return product.redispatch(keys & BELOW, *args, **kwargs)

    library = torch.library.Library(product.namespace, "IMPL")
    library.impl(product, kernel, KEY.name, with_keyset=True)
    return library
