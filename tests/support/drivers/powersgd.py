"""DDP with PowerSGD on matrices of several buckets. Prints what was found as JSON.

torchrun ... -m tests.support.drivers.powersgd --folder FOLDER
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.dataloading.batches import PackedBatch
from vlmpipe.trainer.distributed.process import ProcessContext, run_worker, start_worker
from vlmpipe.trainer.strategies.ddp import Ddp

MARK = "found: "
WIDTH, LAYERS = 320, 7  # 400 KiB a matrix: the first bucket, of 1 MiB, has three, and DDP lays them out anew
START = 2
STEPS = 6


class Layers(nn.Module):
    """Matrices between which nothing is made smaller, a vector, and a matrix that nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, inputs: Tensor, off: Tensor) -> Tensor:
        """`off`: the second matrix is seen and gets a gradient of zeros."""
        hidden = inputs
        for number, matrix in enumerate(self.matrices):
            hidden = hidden + torch.tanh(matrix(hidden)) * (off if number == 1 else 1.0)
        return cast(Tensor, (self.frozen(hidden) ** 2).sum())


class Batch:
    """What `Ddp` asks of a micro-batch: another one for each rank and step."""

    def __init__(self, worker: ProcessContext, step: int, micro_step: int, *, off: bool = False) -> None:
        numbers = torch.Generator().manual_seed(1000 * step + 10 * micro_step + worker.rank)
        self._inputs = torch.randn(5, WIDTH, generator=numbers)
        self._off = torch.tensor(0.0 if off else 1.0)

    def to(self, _: torch.device) -> dict[str, Tensor]:
        return {"inputs": self._inputs, "off": self._off}


def build(worker: ProcessContext, compression: str, *, rank: int = 2, start_step: int = START, **more: Any) -> Ddp:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "global_batch_size": 2 * worker.world_size,
        "precision": "fp32",
        "optimizer": {"learning_rate": 1e-3},
        "gradient_compression": compression,
        "clip_grad_norm": 0.0,
    }
    if compression == "powersgd":
        settings["powersgd"] = {"rank": rank, "start_step": start_step}
    return Ddp(TrainConfig.model_validate(settings | more), Layers().train(), worker)


def gradients(strategy: Ddp, worker: ProcessContext, step: int, **batch: Any) -> dict[str, Tensor]:
    """Those of a step of two micro-batches."""
    batches = cast(list[PackedBatch], [Batch(worker, step, number, **batch) for number in range(2)])
    strategy.forward_backward(batches, 100)
    return {name: parameter.grad.clone() for name, parameter in trained(strategy).items() if parameter.grad is not None}


def trained(strategy: Ddp) -> Mapping[str, nn.Parameter]:
    module = getattr(strategy._module, "module", strategy._module)
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def train(strategy: Ddp, worker: ProcessContext, steps: range) -> list[dict[str, Tensor]]:
    """Gradients of each step. Of one matrix they are zeros at first, so that its factors are drawn again."""
    found = []
    for step in steps:
        found.append(gradients(strategy, worker, step, off=step < START + 2))
        strategy.step(1.0)
    return found


def mean(numbers: Tensor) -> Tensor:
    summed = numbers.clone()
    dist.all_reduce(summed)
    return summed / dist.get_world_size()


def apart(ones: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """The largest distance of two sets of tensors, relative to the longer of the two."""
    assert ones.keys() == others.keys()
    pairs = [(ones[name], others[name]) for name in ones]
    return max(float((one - other).norm() / max(one.norm(), other.norm(), torch.tensor(1e-12))) for one, other in pairs)


def equal_on_all(tensors: Mapping[str, Tensor]) -> bool:
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors.values()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(everyone[0], one) for one in everyone)


def errors(strategy: Ddp, worker: ProcessContext) -> dict[str, Tensor]:
    assert strategy._powersgd is not None
    held = strategy._powersgd.state()["powersgd"]["error"][str(worker.rank)]
    return {name: error.clone() for name, error in held.items()}


def approximation(worker: ProcessContext) -> dict[str, Any]:
    """Gradients at weights that stay: what they are, and what comes of them."""
    plain, low = build(worker, "none"), build(worker, "powersgd")
    found: dict[str, Any] = {"before": 0.0, "after": []}
    exact: dict[str, Tensor] = {}
    sent: dict[str, Tensor] = {}
    for step in range(STEPS):
        true, given = gradients(plain, worker, step), gradients(low, worker, step)
        for strategy in (plain, low):
            strategy._optimizer.zero_grad(set_to_none=False)
        if step < START:
            found["before"] = max(found["before"], apart(true, given))
            continue
        found["after"].append(apart(true, given))
        exact = {name: exact.get(name, 0) + gradient for name, gradient in true.items()}
        sent = {name: sent.get(name, 0) + gradient for name, gradient in given.items()}
    left_out = {name: mean(error).view_as(exact[name]) for name, error in errors(low, worker).items()}
    found["vectors"] = apart(*({n: g for n, g in each.items() if g.ndim == 1} for each in (exact, sent)))
    found["left out"] = apart(exact, sent)
    found["with errors"] = apart(exact, {name: sent[name] + left_out[name] for name in sent})
    matrix = sent["matrices.0.weight"]
    found["sizes"] = [len(one) for one in _buckets(low)]
    found["rank"] = int(torch.linalg.matrix_rank(given["matrices.0.weight"])), min(matrix.shape)
    return found


def _buckets(strategy: Ddp) -> list[Any]:
    assert strategy._powersgd is not None
    return list(strategy._powersgd._layout.values())


def resumed(worker: ProcessContext, folder: Path, **settings: bool) -> dict[str, Any]:
    """A run that is stopped and resumed before its first compressed step, and later: against one that is not."""
    straight = build(worker, "powersgd", rank=3, **settings)
    expected = train(straight, worker, range(STEPS))
    found: dict[str, Any] = {"equal": equal_on_all(trained(straight))}
    group = dist.new_group(backend="gloo")
    for stop in (START - 1, START + 2):
        first = build(worker, "powersgd", rank=3, **settings)
        train(first, worker, range(stop))
        there = folder / str(stop)
        if worker.is_first:
            there.mkdir(parents=True)
        dist.barrier()
        first.snapshot(there, group)()
        dist.barrier()
        second = build(worker, "powersgd", rank=3, **settings)
        second.load(there)
        given = train(second, worker, range(stop, STEPS))
        found[f"from {stop}"] = [
            all(torch.equal(one[name], other[name]) for name in one)
            for one, other in zip(expected[stop:], given, strict=True)
        ]
    return found


def zeros(worker: ProcessContext) -> dict[str, Any]:
    """A matrix that for some steps gets a gradient of zeros: what it gets then, and afterwards."""
    strategy = build(worker, "powersgd", rank=2)
    name = "matrices.1.weight"
    given = [gradients(strategy, worker, step, off=step < START + 2)[name] for step in range(STEPS)]
    return {"norms": [float(gradient.norm()) for gradient in given]}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--deterministic", action="store_true", help="only what a resumed run does then")
    arguments = parser.parse_args()
    worker = start_worker()
    torch.set_num_threads(1)
    found = {"resumed": resumed(worker, arguments.folder, deterministic=arguments.deterministic)}
    if not arguments.deterministic:
        found |= {"approximation": approximation(worker), "zeros": zeros(worker)}
    if worker.is_first:
        print(MARK + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    run_worker(main)
