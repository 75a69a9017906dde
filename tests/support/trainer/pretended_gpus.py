"""CPU tensors that say they lie on GPUs, and refuse to be mixed, as torch refuses it. Values are computed as ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")
_DEVICE: Any = torch.Tensor.device
_TYPE: Any = torch.Tensor.is_cuda
MOVES = (torch.Tensor.to, torch.Tensor.cuda)


class PretendedGpus(TorchFunctionMode):
    """Inside, `device="cuda:1"` and `.to("cuda:1")` work without a GPU.

    A place belongs to a tensor's memory, so that views and parameters have that of the tensor they are made of.
    """

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, torch.device] = {}
        self._alive: list[Tensor] = []  # or the memory of a tensor that is gone would be given to another one

    def place(self, tensor: Tensor) -> torch.device:
        with torch._C.DisableTorchFunction():
            return self._places.get(tensor.untyped_storage().data_ptr(), CPU) if tensor.numel() else CPU

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _DEVICE.__get__:
            return self.place(args[0])
        if func == _TYPE.__get__:
            return self.place(args[0]).type == "cuda"
        given = list(self._tensors((args, kwargs)))
        if func in MOVES:
            return self._move(func, args, kwargs)
        wanted = kwargs.get("device")
        if wanted is not None:
            kwargs["device"] = CPU
        places = {self.place(one) for one in given if one.dim() and one.numel()}
        if func != torch.Tensor.__getitem__ and len(places) > 1 and wanted is None:
            raise RuntimeError(
                f"{func}: expected all tensors to be on the same device, found {sorted(map(str, places))}"
            )
        args = tuple(map(_on_cpu, args))
        output = func(*args, **kwargs)
        place = torch.device(wanted) if wanted is not None else self._of(given)
        for one in self._tensors(output):
            self._tag(one, place)
        return output

    def _of(self, given: list[Tensor]) -> torch.device:
        places = [self.place(one) for one in given]
        return next((one for one in places if one != CPU), CPU)

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        rest = [_place(one) for one in args[1:]]
        named = {name: _place(one) for name, one in kwargs.items()}
        wanted = next((one for one in [*rest, *named.values()] if isinstance(one, torch.device)), None)
        source: Tensor = args[0]
        if wanted is None and isinstance(rest[0] if rest else None, Tensor):
            wanted = self.place(rest[0])
        target = self.place(source) if wanted is None else wanted
        rest = [CPU if isinstance(one, torch.device) else one for one in rest]
        named = {name: CPU if isinstance(one, torch.device) else one for name, one in named.items()}
        output = torch.Tensor.to(source, *rest, **named)
        if target != self.place(source):
            output = output.clone()
        self._tag(output, target)
        return output

    def _tag(self, tensor: Tensor, place: torch.device) -> None:
        with torch._C.DisableTorchFunction():
            if tensor.numel():
                self._places[tensor.untyped_storage().data_ptr()] = place
                self._alive.append(tensor)

    @staticmethod
    def _tensors(values: Any) -> Iterator[Tensor]:
        return (one for one in tree_leaves(values) if isinstance(one, Tensor))


def _place(value: Any) -> Any:
    return torch.device(value) if isinstance(value, str | torch.device) else value


def _on_cpu(value: Any) -> Any:
    return tree_map(lambda one: CPU if isinstance(one, torch.device) else one, value)
