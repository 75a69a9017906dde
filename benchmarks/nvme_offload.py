"""Why `train.nvme_path` is not DeepSpeed's NVMe offloading: its ZeRO-3 with the optimizer on a disk, and in memory.

Run `python -m benchmarks.nvme_offload`. DeepSpeed compiles its `async_io` for it, which takes minutes the first time,
and needs libaio with its headers (`apt-get install libaio-dev`) and a compiler. Where these are not there it says so,
and ends with exit code 69.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ExitCode, UserError, run_main

LAYERS, WIDTH, ROWS, STEPS = 4, 600, 16, 4
PLACES = ("none", "cpu", "nvme", "nvme-alone")  # of the optimizer, as DeepSpeed says it; alone: one parameter a group
SAME = 1e-6  # of a weight: AdamW's first step moves each by the rate, which is a thousand times that
RATE = 1e-3
NAMES = {
    "none": "without offloading",
    "cpu": "in memory",
    "nvme": "on a disk",
    "nvme-alone": "on a disk, each parameter in a group of its own",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a process that trains
    parser.add_argument("--place", choices=PLACES, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.folder:
        train(chosen.folder, chosen.place, resume=chosen.resume)
        return 0
    require_async_io()
    with tempfile.TemporaryDirectory(prefix="vlmpipe-nvme-") as scratch:
        straight = {place: trained(Path(scratch), place) for place in PLACES}
        resumed = {place: trained(Path(scratch), place, resume=True) for place in PLACES[1:]}
    report(straight, resumed)
    return 0


def require_async_io() -> None:
    """Raises UserError (exit 69) where DeepSpeed cannot write to a disk."""
    _deepspeed()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise UserError(
            "DeepSpeed's async_io cannot be built here, so nothing was measured",
            expected="libaio with its headers, and a C++ compiler",
            fix="apt-get install libaio-dev g++; elsewhere than in the system's folders, say where in CFLAGS, LDFLAGS, "
            "CPATH, LIBRARY_PATH and LD_LIBRARY_PATH",
            code=ExitCode.UNAVAILABLE,
        )


def trained(scratch: Path, place: str, *, resume: bool = False) -> dict[str, Any]:
    """What a process of its own found: an engine leaves traces in the one that it was made in."""
    folder = scratch / place
    command = [sys.executable, "-m", "benchmarks.nvme_offload", "--folder", str(folder), "--place", place]
    done = subprocess.run([*command, *(["--resume"] if resume else [])], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"training {NAMES[place]} failed:\n{done.stdout}{done.stderr}", code=ExitCode.UNEXPECTED)
    return dict(torch.load(folder / "found.pt", weights_only=True))


def train(folder: Path, place: str, *, resume: bool) -> None:
    """A few steps, a checkpoint and one step more; with `resume` that step alone, from the checkpoint."""
    deepspeed = _deepspeed()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    inputs, targets = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    if resume:
        for parameter in model.parameters():
            nn.init.normal_(parameter)  # so that what is not loaded shows
    disk = folder / ("another disk" if resume else "disk")  # as on the machine that takes over
    offload = {"device": place.removesuffix("-alone"), "nvme_path": str(disk), "pin_memory": False}
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": offload}
    if place.endswith("-alone"):
        zero["sub_group_size"] = 1
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    if resume:
        engine.load_checkpoint(folder / "checkpoint", tag="last")
    losses: list[float] = []
    weights: dict[str, Tensor] = {}
    for step in range(1 if resume else STEPS + 1):
        if step == STEPS:
            engine.save_checkpoint(folder / "checkpoint", tag="last")
        loss = (engine(inputs) - targets).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step == 0:
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.save({"losses": losses, "weights": weights}, folder / "found.pt")


def report(straight: dict[str, dict[str, Any]], resumed: dict[str, dict[str, Any]]) -> None:
    """Print what differs from training without offloading."""
    import deepspeed

    print(f"ZeRO-3 in fp32 by DeepSpeed {deepspeed.__version__}, one process, {LAYERS} layers of {WIDTH} x {WIDTH}.")
    plain = straight["none"]
    for place in PLACES[1:]:
        found = straight[place]
        print(f"\nThe optimizer {NAMES[place]}, beside training {NAMES['none']}:")
        pairs = zip(plain["losses"], found["losses"], strict=True)
        most = max(abs(other - loss) / loss for loss, other in pairs)
        print(f"  losses of {STEPS + 1} steps differ by {most:.1e} at most, relative")
        for name, weight in plain["weights"].items():
            share = (found["weights"][name] - weight).abs().gt(SAME).float().mean()
            print(f"  {name} after one step: {share:.1%} of the numbers differ by more than {SAME:g}")
        next_loss, own = resumed[place]["losses"][0], found["losses"][STEPS]
        print(f"  step {STEPS + 1} from its own checkpoint has loss {next_loss:.5f}, uninterrupted {own:.5f}")


def _deepspeed() -> Any:
    lonely = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in {**lonely, "DS_ACCELERATOR": "cpu"}.items():
        os.environ.setdefault(name, value)
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False  # see trainer.strategies.deepspeed.engine
    deepspeed.utils.logger.setLevel("WARNING")
    return deepspeed


if __name__ == "__main__":
    sys.exit(run_main(main))
