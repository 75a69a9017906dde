"""Shared by strategies with a torch optimizer: clipping, the update, and DCP checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.config.train_options import Precision
from vlmpipe.trainer.dataloading.batches import PackedBatch
from vlmpipe.trainer.hooks.features import average_of
from vlmpipe.trainer.optimizer.build import set_rates
from vlmpipe.trainer.strategies.base import SavedFiles, StepResult
from vlmpipe.trainer.strategies.mixed_precision import LossScale, autocast
from vlmpipe.trainer.strategies.named_checkpoint import (
    EMA,
    host_stager,
    load_state,
    metadata_of,
    ranges_of,
    write_state,
)

# Checkpoints leave out frozen parameters, which are rebuilt from their source and compared by digest.
STATE_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


def clip_and_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_scale: LossScale,
    clip_grad_norm: float,
    rate_factor: float,
    *,
    keep_gradients: bool = False,
) -> StepResult:
    """Clip by the global norm (0: only measure it), set the learning rates, update, clear the gradients.

    Gradients that overflow are cleared without an update. `keep_gradients` zeroes them in place.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    loss_scale.unscale(parameters)
    norm = gradient_norm(parameters)
    scale_gradients(parameters, clip_grad_norm, norm)
    set_rates(optimizer, rate_factor)
    accepted = loss_scale.accepts(norm)
    if accepted:
        optimizer.step()
    clear_gradients(parameters, keep=keep_gradients)
    return StepResult(norm, skipped=not accepted)


@torch.no_grad()
def clear_gradients(parameters: Iterable[nn.Parameter], *, keep: bool) -> None:
    """Release gradients, or with `keep` zero them in place.

    A fused optimizer's own `zero_grad` fails on a mix of tensors and DTensors.
    """
    for parameter in parameters:
        if not keep:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Global gradient norm of parameters on one device mesh, several, or none. Collective where they are sharded.

    torch's own functions only combine tensors of one mesh.
    """
    norms = []
    for group in _by_mesh(parameters):
        norm = get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


@torch.no_grad()
def scale_gradients(parameters: Sequence[nn.Parameter], most: float, norm: Tensor) -> None:
    """Clip gradients with the global norm `norm` to `most`; 0 does not clip.

    Each rank scales what it holds: for DTensors, torch would first find out how each list of them is sharded.
    """
    if not most:
        return
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grads_with_norm_
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            by_device.setdefault(local.device, []).append(local)
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device))


def _by_mesh(parameters: Sequence[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    meshes: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return meshes.values()


def loss_without_gradients(module: nn.Module, batch: PackedBatch, device: torch.device, precision: Precision) -> Tensor:
    """`Strategy.forward_loss` under autocast to `precision`."""
    module.eval()
    with torch.no_grad(), autocast(precision, device):
        loss: Tensor = module(**batch.to(device))
    module.train()
    reshard(module)
    return loss


def reshard(module: nn.Module) -> None:
    """Free FSDP's gathered weights after a forward pass alone: FSDP leaves that to a backward pass."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


class TorchStrategy:
    """Base of the strategies with a torch optimizer: learning rate, averaged weights, DCP checkpoints. See `Strategy`.

    Snapshots are copied into host memory. Where `copies` ranks hold the same tensors, rank `copy` of them saves its
    share: a node with eight such ranks has room for one copy, not for eight.
    """

    checkpoint_format = "dcp"

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        train: TrainConfig,
        *,
        copies: int = 1,
        copy: int = 0,
    ) -> None:
        self._stateful, self._optimizer, self.loss_scale = module, optimizer, LossScale(train.precision)
        self._copies, self._copy = copies, copy
        trained = trained_of(module)
        self._trained = list(trained)
        self._ema = average_of(train, lambda: list(trained.values()))
        on_gpu = any(parameter.is_cuda for parameter in module.parameters())
        self._stager = host_stager(on_gpu=on_gpu)

    def learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        return self._ema.swapped() if self._ema else contextlib.nullcontext()

    def snapshot(self, folder: Path, group: ProcessGroup) -> Callable[[], None]:
        """Files are keyed by parameter name, so any world size and any torch strategy can load them."""
        lasting, _ = self._lasting()
        lasting |= self._average()
        if self._copies > 1:
            lasting = self._share(lasting)
        state = self._stager.stage(lasting | self.loss_scale.state())
        assert isinstance(state, dict)
        return lambda: write_state(state, folder, group)

    def reads(self, files: SavedFiles) -> dict[str, list[tuple[int, int]]]:
        metadata = metadata_of(files)
        return ranges_of(self._wanted(metadata.state_dict_metadata).state, metadata, files)

    def load(self, folder: Path) -> None:
        """Load a snapshot, resharded for this run's layout."""
        reader = dcp.FileSystemReader(folder)
        target = self._wanted(reader.read_metadata().state_dict_metadata)
        load_state(target.state, reader)
        for numbers in target.scale.values():
            self.loss_scale.restore(numbers)
        set_state_dict(
            self._stateful,
            self._optimizer,
            model_state_dict=target.state["model"],
            optim_state_dict={**target.optimizer_state, **target.state["optimizer"]},
            options=STATE_OPTIONS,
        )
        if self._ema and not target.has_average:
            self._ema.restart("the checkpoint")

    def _wanted(self, saved: Mapping[str, object]) -> _Wanted:
        """Targets into which this rank loads the tensors `saved` of a checkpoint; the average is filled in place."""
        state, optimizer_state = self._lasting()
        # A checkpoint of another precision has no loss scale.
        scale = {name: tensor for name, tensor in self.loss_scale.state().items() if name in saved}
        average = self._average()
        has_average = all(f"{EMA}.{name}" in saved for name in average.get(EMA, ()))
        state |= scale | (average if has_average else {})
        return _Wanted(state, optimizer_state, scale, has_average)

    def _lasting(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the content of a checkpoint, and the whole optimizer state.

        Without parameter groups, whose settings come from the run file and whose grouping depends on the layout, and
        without second names of shared weights: torch would write a tied head twice, and a frozen one once.
        """
        weights, moments = get_state_dict(self._stateful, self._optimizer, options=STATE_OPTIONS)
        for name in second_names(self._stateful):
            weights.pop(name, None)
        return {"model": weights, "optimizer": {"state": moments["state"]}}, moments

    def followed(self, result: StepResult) -> StepResult:
        """Update the averaged weights after a step that was not skipped; returns `result`."""
        if self._ema and not result.skipped:
            self._ema.update()
        return result

    def _average(self) -> dict[str, Any]:
        """The averaged weights by name; empty without `train.ema_decay`."""
        return {EMA: dict(zip(self._trained, self._ema.averages, strict=True))} if self._ema else {}

    def _share(self, state: dict[str, Any]) -> dict[str, object]:
        """The parameters that this rank writes, with their optimizer state."""
        weights, moments = state["model"], state["optimizer"]["state"]
        written = share_of({name: weight.nbytes for name, weight in weights.items()}, self._copies, self._copy)
        shared: dict[str, object] = {
            "model": {name: weights[name] for name in sorted(written)},
            "optimizer": {"state": {name: held for name, held in moments.items() if name in written}},
        }
        if EMA in state:
            shared[EMA] = {name: average for name, average in state[EMA].items() if name in written}
        return shared


@dataclass(frozen=True)
class _Wanted:
    """Tensors to load, and parts of them."""

    state: dict[str, Any]
    optimizer_state: dict[str, Any]  # with parameter groups
    scale: dict[str, Any]
    has_average: bool


def trained_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters by their names in checkpoints."""
    return {name: parameter for name, parameter in _bare(module).named_parameters() if parameter.requires_grad}


def second_names(module: nn.Module) -> list[str]:
    """Names in checkpoints of parameters that come under another name before, such as a tied head's."""
    first = {name for name, _ in _bare(module).named_parameters()}
    return [name for name, _ in _bare(module).named_parameters(remove_duplicate=False) if name not in first]


def _bare(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def share_of(sizes_bytes: Mapping[str, int], shares: int, number: int) -> set[str]:
    """Names in share `number` of `shares` shares of similar size: the largest first, each to the smallest share."""
    share_bytes, names = [0] * shares, set()
    for name in sorted(sizes_bytes, key=lambda name: (-sizes_bytes[name], name)):
        smallest = share_bytes.index(min(share_bytes))
        share_bytes[smallest] += sizes_bytes[name]
        if smallest == number:
            names.add(name)
    return names
