"""Training with Horovod, for any model: gradients are summed by its DistributedOptimizer.

The same loop serves a fixed number of processes (horovodrun) and one that changes (elastic.py): what a process that
joins later must know is in the state.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(64 << 20))  # bytes of gradients in one all-reduce; 0: each alone

import horovod.torch as hvd
import torch

# The model's summed loss of these samples, and how many label tokens they have.
LossOf = Callable[[list[int]], tuple[torch.Tensor, int]]
asked_to_stop: list[int] = []  # signals


@dataclass(frozen=True)
class Settings:
    """How training goes; the same in all processes."""

    steps: int
    micro_batch: int  # samples of a process in a step
    learning_rate: float  # for one process; N processes have N times as large a batch, and take N times as much
    schedule: str = "cosine"
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    commit_every: int = 1  # steps that a lost process may cost

    def learning_rate_at(self, step: int, processes: int) -> float:
        warmup = max(1, self.steps // 10)
        falling = 0.5 + 0.5 * math.cos(math.pi * step / self.steps) if self.schedule == "cosine" else 1.0
        return self.learning_rate * processes * min((step + 1) / warmup, falling)


def optimizer_of(model: torch.nn.Module, settings: Settings, *, fp16: bool = False) -> torch.optim.Optimizer:
    """AdamW whose gradients are sums over all processes, sent as fp16 on request.

    Its state is there from the beginning: where it is empty, Horovod 0.28.1's broadcast makes a step to create it,
    and that step would decay the weights.
    """
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), weight_decay=settings.weight_decay),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if fp16 else hvd.Compression.none,
        op=hvd.Sum,
    )
    for parameter in model.parameters():
        zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}
    return optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: Sized, seed: int) -> Any:
    """What all processes agree on. Rank 0's is broadcast when training starts, and when processes come."""
    sampler = hvd.elastic.ElasticSampler(samples, seed=seed)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=0, log=[], stop=False)
    state.register_reset_callbacks([sampler.reset])  # also where processes only left, and nothing is broadcast
    return state


@hvd.elastic.run
def train(state: Any, settings: Settings, loss_of: LossOf, committed: Callable[[Any], None]) -> None:
    """Until all steps are made, or somebody was asked to stop. `committed(state)` is called on rank 0.

    Runs again from the last commit after a process was lost, and from this step on when others are there.
    """
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_stop.append(number))
    while state.step < settings.steps and not state.stop:
        left = list(state.sampler)  # this process's samples of the epoch
        for start in range(0, len(left), settings.micro_batch):
            _step(state, settings, loss_of, left[start : start + settings.micro_batch])
            if ended := state.step == settings.steps or state.stop:
                break
            if state.step % settings.commit_every == 0:
                _commit(state, committed)
        if not ended:
            state.sampler.set_epoch(state.sampler.epoch + 1)
    _commit(state, committed)


def _step(state: Any, settings: Settings, loss_of: LossOf, samples: Sequence[int]) -> None:
    loss, tokens = loss_of(list(samples))
    mine = torch.tensor([float(loss.detach()), tokens, len(asked_to_stop)], dtype=torch.float64)
    total_loss, total_tokens, stops = hvd.allreduce(mine, op=hvd.Sum, name="totals").tolist()
    (loss / total_tokens).backward()  # summed by the optimizer: the mean over the label tokens of all processes
    state.optimizer.synchronize()  # the sums are there: they are clipped, not each process's share
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), settings.clip_norm)
    rate = settings.learning_rate_at(state.step, hvd.size())
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    with state.optimizer.skip_synchronize():
        state.optimizer.step()
    state.optimizer.zero_grad()
    state.step, state.stop = state.step + 1, stops > 0
    state.sampler.record_batch(0, len(samples))
    made = {"step": state.step, "loss": total_loss / total_tokens, "learning_rate": rate, "processes": hvd.size()}
    state.log = [*state.log, made]


def _commit(state: Any, committed: Callable[[Any], None]) -> None:
    state.save()
    if hvd.rank() == 0:
        committed(state)
    state.check_host_updates()
