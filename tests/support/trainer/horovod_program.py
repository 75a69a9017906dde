"""A process of recipes/horovod on a tiny model: horovod_program.py SETTINGS.json. Imports nothing of this repository.

With "batches" in its settings, one process without Horovod instead, which trains on these batches. Writes the weights.
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


def tiny_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 3, bias=False))


def loss_of(model: torch.nn.Module, samples: list[int]) -> tuple[torch.Tensor, int]:
    """The summed loss, and how many labels the samples have: one to three each."""
    inputs, labels = [], []
    for sample in samples:
        generator = torch.Generator().manual_seed(sample)
        inputs.append(torch.randn(1 + sample % 3, 6, generator=generator))
        labels.append(torch.randint(3, (1 + sample % 3,), generator=generator))
    rows = torch.cat(inputs)
    return torch.nn.functional.cross_entropy(model(rows), torch.cat(labels), reduction="sum"), len(rows)


def replay(given: Any) -> torch.nn.Module:
    """AdamW on the given batches, each with its learning rate."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    for batch in given["batches"]:
        loss, labels = loss_of(model, batch["samples"])
        (loss / labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = batch["learning_rate"]
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(given: Any, folder: Path) -> torch.nn.Module | None:
    """The model, on rank 0."""
    sys.path.insert(0, given["recipe"])
    import horovod.torch as hvd
    from loop import Settings, optimizer_of, state_of
    from loop import train as train_with_horovod

    hvd.init()
    model, settings = tiny_model(), Settings(**given["settings"])
    if hvd.rank():  # the start is rank 0's
        torch.nn.init.ones_(model[0].weight)
    state = state_of(model, optimizer_of(model, settings, fp16=given["fp16"]), range(given["samples"]), seed=3)
    used, killed = folder / "used.jsonl", folder / "killed"

    def noted_loss(samples: list[int]) -> tuple[torch.Tensor, int]:
        if state.step == given["kill_at"] and hvd.rank() == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(given["pause_s"] if hvd.size() < 3 else 0)  # until there are three again
        with used.open("a") as file:
            print(json.dumps({"step": state.step + 1, "samples": samples}), file=file)
        return loss_of(model, samples)

    def committed(state: Any) -> None:
        (folder / "log.json").write_text(json.dumps(state.log))

    train_with_horovod(state, settings, noted_loss, committed)
    return model if hvd.rank() == 0 else None


def main() -> None:
    folder, given = Path(sys.argv[1]).parent, json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    model = replay(given) if "batches" in given else train(given, folder)
    if model:
        torch.save(model.state_dict(), folder / "weights.pt")


if __name__ == "__main__":
    main()
