"""PowerSGD gradient compression for DDP (`train.gradient_compression: powersgd`).

Vogels et al. 2019, arXiv 1905.13727. The algorithm is torch's own hook. Here is what a run needs beside it: an order of
collectives that is the same on all ranks, and state that outlasts a run's end. The hook keeps its state by DDP's
buckets, which are laid out anew after the first step of every start; here it is kept by parameters.
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

from trainer.config.train_options import PowerSgdConfig
from trainer.sizing.powersgd import MIN_COMPRESSION_RATE, factors_rank

ENTRY = "powersgd"  # of a checkpoint's state, beside "model" and "optimizer"
# Factors of one or two columns are made orthogonal by dividing by lengths. That of a gradient of zeros is 0.
SHORTEST = 1e-20


class Slot(NamedTuple):
    """A parameter in a bucket: a matrix, where its error and its factor begin there, and the factor's rank."""

    name: str
    rows: int
    columns: int
    rank: int  # 0 for what travels as it is
    first: int
    factor_first: int

    @property
    def error(self) -> slice:
        return slice(self.first, self.first + self.rows * self.columns)

    @property
    def factor(self) -> slice:
        return slice(self.factor_first, self.factor_first + self.columns * self.rank)


class PowerSgd:
    """The hook of one rank. `names` gives the trained parameters the names that checkpoints have for them.

    What the approximation leaves out of a rank's gradients, its error, is added to those of the next step.
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
        self._layout: dict[int, list[Slot]] = {}  # of what the hook's state holds, by bucket
        # What was loaded or taken out of buckets, and no bucket holds yet: by parameter, flat.
        self._errors: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}

    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor]:
        state, index, gradients = self._state, bucket.index(), bucket.buffer()
        if state.iter >= state.start_powerSGD_iter:
            if index == 0:
                state.rng.seed(state.iter)  # so that checkpoints need not hold what is drawn
            slots = self._slots(bucket.parameters())
            if self._layout.get(index) != slots:
                if index in self._layout:
                    self._take_apart()
                self._put_together(index, slots, gradients)
            self._revive(index)
        mean: Future[Tensor] = powerSGD_hook(state, bucket)
        if gradients.device.type == "cpu":
            # On GPUs all of it is in NCCL's queue by now. gloo goes on in its threads, from which the collectives of
            # two buckets would start in another order on each rank.
            mean.wait()
        return mean

    def begin_at(self, step: int) -> None:
        """As many steps of the run are done."""
        self._state.iter = step

    def state(self) -> dict[str, Any]:
        """For a checkpoint: this rank's errors, and the factors that the next step begins with, the same on all ranks.

        Empty before the first step that is compressed.
        """
        errors, factors = self._by_parameter()
        return {ENTRY: {"error": {str(self._rank): errors}, "factor": factors}} if errors else {}

    def wanted(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank reads of a checkpoint with these tensors: to be filled, and handed to `restore`.

        Training follows the mean of the ranks' errors. On another number of ranks each takes on the errors of every
        so many-th rank, so that none is lost.
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
        """Go on from what was read, in the place of what is held."""
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
        """As the hook goes through a bucket of these: factors of equal matrices lie side by side."""
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
        """DDP has laid its buckets out anew: what they hold belongs to other places."""
        self._errors, self._factors = self._by_parameter()
        for held in (self._layout, self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict):
            held.clear()

    def _put_together(self, index: int, slots: list[Slot], gradients: Tensor) -> None:
        """A bucket's state, of what is held of its parameters. The hook makes what is missing: errors of zeros, and
        factors at random."""
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
        """Draw columns of factors that are zeros, as a gradient of zeros leaves them: no step would change them again,
        and nothing of that matrix would ever travel."""
        factors = self._state.q_memory_dict.get(index)
        if factors is None or bool(factors.all()):
            return
        for slot in self._layout[index]:
            factor = factors[slot.factor].view(slot.columns, slot.rank)
            empty = ~factor.any(dim=0)
            drawn = self._state.rng.standard_normal((slot.columns, int(empty.sum())))
            factor[:, empty] = torch.from_numpy(drawn).to(factor)


def ranks_with_errors(saved: Iterable[str]) -> int:
    """How many ranks' errors are among the tensors of a checkpoint."""
    prefix = f"{ENTRY}.error."
    return len({key.removeprefix(prefix).partition(".")[0] for key in saved if key.startswith(prefix)})
