"""A process of recipes/parameter-server on a tiny model: server_group.py SETTINGS.json, with RANK and MASTER_*.

Or, with "ddp" in its settings, one of DistributedDataParallel on the same micro-batches. Rank 0 writes the weights.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "recipes/parameter-server"))
SAMPLES_EACH = 8
IN_TURN, TURN = -2, 4  # each worker is slow for so many micro-batches, then the next one


def tiny_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 3, bias=False))


def loss_of(model: torch.nn.Module, number: int) -> tuple[torch.Tensor, int]:
    """The summed loss of a micro-batch, and how many labels it has: another number for each."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(SAMPLES_EACH, 6, generator=generator)
    labels = torch.randint(3, (SAMPLES_EACH,), generator=generator)
    counted = SAMPLES_EACH - number % 3
    logits = model(inputs[:counted])
    return torch.nn.functional.cross_entropy(logits, labels[:counted], reduction="sum"), counted


def train_with_ddp(rank: int, settings: Any) -> torch.nn.Module:
    """Its gradients are means over ranks; over the step's labels they are world / labels times as much."""
    import torch.distributed as dist

    world = settings.workers
    dist.init_process_group("gloo", rank=rank, world_size=world)
    model = tiny_model()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=settings.weight_decay)
    for step in range(settings.steps):
        loss, counted = loss_of(ddp, step * world + rank)
        loss.backward()
        total = torch.tensor(counted)
        dist.all_reduce(total)
        for parameter in model.parameters():
            parameter.grad.mul_(world / int(total))  # type: ignore[union-attr]
        optimizer.param_groups[0]["lr"] = settings.learning_rate_at(step)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    return model


def main() -> None:
    from server import Settings
    from worker import Servers, join_group, leave, serve, work

    given, rank = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), int(os.environ["RANK"])
    settings, servers = Settings(**given["settings"]), given["servers"]
    weights = Path(sys.argv[1]).with_name(given["weights"])
    if given["ddp"]:
        model = train_with_ddp(rank, settings)
        if rank == 0:
            torch.save(model.state_dict(), weights)
        leave(0)
    join_group(rank, settings.workers)
    if rank >= settings.workers:
        leave(serve())
    model = tiny_model()
    made = 0

    def gradients(number: int) -> tuple[float, int]:
        nonlocal made
        killed = weights.with_suffix(".killed")
        if [rank, made] == given["kill"] and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        made += 1
        is_slow = rank == given["slow"] or (given["slow"] == IN_TURN and made // TURN % settings.workers == rank)
        time.sleep(given["each_s"] + (given["slow_s"] if is_slow else 0))
        loss, counted = loss_of(model, number)
        loss.backward()
        return float(loss.detach()), counted

    shards = Servers(model, rank, servers, settings)
    shards.wait()
    if rank == 0:
        shards.set_up({}, 0, [0])
    began_s = time.monotonic()
    code = work(model, shards, gradients)
    if rank == 0 and code == 0:
        seconds = time.monotonic() - began_s
        shards.finish()
        result = {"seconds": seconds, "max_ahead": shards.max_ahead(), "updates": made}
        weights.with_suffix(".json").write_text(json.dumps(result))
        torch.save(model.state_dict(), weights)
    leave(code)


if __name__ == "__main__":
    main()
