"""PowerSGD gradient compression for DDP (`train.gradient_compression: powersgd`).

Vogels et al. 2019, arXiv 1905.13727; the algorithm is torch's own hook. Added here: the same order of collectives on
all ranks, and state that survives a restart. The hook stores state by DDP bucket, and DDP rebuilds its buckets after
the first step; here it is stored by parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from vlmpipe.trainer.config.train_options import PowerSgdConfig
from vlmpipe.trainer.sizing.ddp_gradients import MIN_COMPRESSION_RATE, factors_rank

ENTRY = "powersgd"  # of a checkpoint's state, beside "model" and "optimizer"
# Epsilon for the norms that factors are divided by: a gradient of zeros has norm 0.
SHORTEST = 1e-20


class Slot(NamedTuple):
    """A parameter's place in a bucket: its matrix shape, its factor's rank, and where its error and factor begin."""

    name: str
    rows: int
    columns: int
    rank: int  # 0: sent uncompressed
    first: int
    factor_first: int

    @property
    def error(self) -> slice:
        return slice(self.first, self.first + self.rows * self.columns)

    @property
    def factor(self) -> slice:
        return slice(self.factor_first, self.factor_first + self.columns * self.rank)


class PowerSgd:
    """The hook of one rank. `names`: the trained parameters' names in checkpoints.

    The approximation error of a rank's gradients is added to those of its next step.
    """

    def __init__(self, config: PowerSgdConfig, names: Mapping[nn.Parameter, str], *, rank: int, ranks: int) -> None:
        self._names, self._rank, self._ranks = names, rank, ranks
        self._state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=config.rank,
            start_powerSGD_iter=config.start_step,
            min_compression_rate=MIN_COMPRESSION_RATE,
            orthogonalization_epsilon=SHORTEST,
        )
        self._layout: dict[int, list[Slot]] = {}  # of the hook's state, by bucket
        # State that no bucket holds yet, flat, by parameter.
        self._errors: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}

    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor]:
        state, index, gradients = self._state, bucket.index(), bucket.buffer()
        if state.iter >= state.start_powerSGD_iter:
            if index == 0:
                state.rng.seed(state.iter)  # so that checkpoints need no random state
            slots = self._slots(bucket.parameters())
            if self._layout.get(index) != slots:
                if index in self._layout:
                    self._take_apart()
                self._put_together(index, slots, gradients)
            self._revive(index)
        mean: Future[Tensor] = powerSGD_hook(state, bucket)
        if gradients.device.type == "cpu":
            # NCCL has everything queued by now. gloo's threads would start the collectives of two buckets in another
            # order on each rank.
            mean.wait()
        return mean

    def begin_at(self, step: int) -> None:
        """Continue after `step` steps."""
        self._state.iter = step

    def state(self) -> dict[str, Any]:
        """Checkpoint entry: this rank's errors, and the next step's factors, which are the same on all ranks.

        Empty before the first compressed step.
        """
        errors, factors = self._by_parameter()
        return {ENTRY: {"error": {str(self._rank): errors}, "factor": factors}} if errors else {}

    def wanted(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Empty tensors for what this rank loads of a checkpoint with the tensors `saved`; pass them to `restore`.

        Training depends on the mean of the ranks' errors. When the number of ranks changes, each rank takes over the
        errors of every n-th saved rank, so none is lost.
        """
        ranks = ranks_with_errors(saved)
        errors = {
            str(number): {name: torch.zeros(parameter.numel()) for parameter, name in self._names.items()}
            for number in range(self._rank, ranks, self._ranks)
        }
        factors = {}
        for slot in self._slots(list(self._names)):
            there = saved.get(f"{ENTRY}.factor.{slot.name}")
            if there is not None and there.size == (slot.columns * slot.rank,):  # else the run file's rank has changed
                factors[slot.name] = torch.zeros(there.size)
        return {ENTRY: {"error": errors, "factor": factors}} if ranks else {}

    def restore(self, filled: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Replace the state by what was loaded."""
        self._take_apart()
        self._errors, self._factors = {}, {}
        if not filled:
            return
        share = self._ranks / ranks_with_errors(saved)
        for errors in filled[ENTRY]["error"].values():
            for name, error in errors.items():
                held = self._errors.setdefault(name, torch.zeros_like(error))
                held.add_(error, alpha=share)
        self._factors = dict(filled[ENTRY]["factor"])

    def _slots(self, parameters: Sequence[Tensor]) -> list[Slot]:
        """Places in a bucket of `parameters`, in the hook's order: factors of equal shapes are contiguous."""
        slots: list[Slot] = []
        alike: dict[tuple[int, int], list[int]] = {}
        first = 0
        for number, parameter in enumerate(parameters):
            rows, columns = len(parameter), parameter.numel() // len(parameter)
            rank = factors_rank(rows, columns, self._state.matrix_approximation_rank)
            slots.append(Slot(self._names[cast(nn.Parameter, parameter)], rows, columns, rank, first, 0))
            alike.setdefault((rows, columns), []).append(number)
            first += parameter.numel()
        factor_first = 0
        for number in itertools.chain(*alike.values()):
            slots[number] = slots[number]._replace(factor_first=factor_first)
            factor_first += slots[number].columns * slots[number].rank
        return slots

    def _by_parameter(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        errors, factors = dict(self._errors), dict(self._factors)
        for index, slots in self._layout.items():
            for slot in slots:
                errors[slot.name] = self._state.error_dict[index][slot.error]
                if slot.rank:
                    factors[slot.name] = self._state.q_memory_dict[index][slot.factor]
        return errors, factors

    def _take_apart(self) -> None:
        """Move all state out of the buckets, which DDP has rebuilt."""
        self._errors, self._factors = self._by_parameter()
        for held in (self._layout, self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict):
            held.clear()

    def _put_together(self, index: int, slots: list[Slot], gradients: Tensor) -> None:
        """Build a bucket's state from that of its parameters. The hook fills gaps: zero errors, random factors."""
        if any(slot.name in self._errors for slot in slots):
            self._state.error_dict[index] = error = torch.zeros_like(gradients)
            for slot in slots:
                if slot.name in self._errors:
                    error[slot.error] = self._errors.pop(slot.name).to(error.device)
        compressed = [slot for slot in slots if slot.rank]
        held = {slot.name: self._factors.pop(slot.name) for slot in compressed if slot.name in self._factors}
        if compressed and len(held) == len(compressed):
            factors = gradients.new_empty(sum(slot.columns * slot.rank for slot in compressed))
            for slot in compressed:
                factors[slot.factor] = held[slot.name].to(factors.device)
            self._state.q_memory_dict[index] = factors
            self._state.p_memory_dict[index] = gradients.new_empty(sum(slot.rows * slot.rank for slot in compressed))
        self._layout[index] = slots

    def _revive(self, index: int) -> None:
        """Redraw zero columns of factors, which a zero gradient leaves: they would stay zero for ever."""
        factors = self._state.q_memory_dict.get(index)
        if factors is None or bool(factors.all()):
            return
        for slot in self._layout[index]:
            factor = factors[slot.factor].view(slot.columns, slot.rank)
            empty = ~factor.any(dim=0)
            drawn = self._state.rng.standard_normal((slot.columns, int(empty.sum())))
            factor[:, empty] = torch.from_numpy(drawn).to(factor)


def ranks_with_errors(saved: Iterable[str]) -> int:
    """Number of ranks whose errors a checkpoint's tensors hold."""
    prefix = f"{ENTRY}.error."
    return len({key.removeprefix(prefix).partition(".")[0] for key in saved if key.startswith(prefix)})
