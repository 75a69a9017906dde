"""What the strategies built on torch alone share: a step over an ordinary optimizer, and DCP checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from trainer.optim import set_rates
from trainer.strategies.strategy import StepResult

# Frozen parameters are rebuilt from their source and compared by digest: they would only fill checkpoints.
STATE_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


def clip_and_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip_grad_norm: float,
    rate_factor: float,
    *,
    keep_gradients: bool = False,
) -> StepResult:
    """Clip by the global norm (0: measure only), set the rates, update, clear.

    `keep_gradients` sets gradients to zero where they are, instead of letting go of them.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip_grad_norm or float("inf"))
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    set_rates(optimizer, rate_factor)
    optimizer.step()
    optimizer.zero_grad(set_to_none=not keep_gradients)
    return StepResult(norm)


class Snapshots:
    """Copies of model and optimizer state in host memory, in the same buffers each time."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module, self._optimizer = module, optimizer
        on_gpu = any(parameter.is_cuda for parameter in module.parameters())
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,  # /dev/shm is small in containers
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def take(self, folder: Path, group: ProcessGroup) -> Callable[[], None]:
        """See `Strategy.snapshot`. Files are by parameter name, which any world size and either strategy can read."""
        state = self._stager.stage(_state(self._module, self._optimizer))
        assert isinstance(state, dict)

        def write() -> None:
            with _plain_errors():
                dcp.save(
                    state,
                    storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=True),
                    process_group=group,
                )

        return write


def load_dcp(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read what a snapshot wrote, resharded for the present layout."""
    state = _state(module, optimizer)
    with _plain_errors():
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    set_state_dict(
        module,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=STATE_OPTIONS,
    )


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the first rank's own error on every rank: DCP wraps the errors of all into one that is no Exception."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from None


def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(module, optimizer, options=STATE_OPTIONS)
    return {"model": model_state, "optimizer": optimizer_state}
