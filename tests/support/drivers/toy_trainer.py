"""A training program of one number and no libraries, with faults on order, to see that `vlmpipe prove` finds them.

Its model file is copied; what it trains is `w`, on the lengths of the answers. Faults: means (each process and each
micro-batch is averaged by itself), forget (a checkpoint's weights are not read), done (stopped, it ends with 0).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import time
from pathlib import Path

RATE = 0.05


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("data", "model", "output", "checkpoints", "resume"):
        parser.add_argument(f"--{name}", type=Path)
    for name in ("steps", "micro", "total", "save-every"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--faults", nargs="*", default=[])
    args = parser.parse_args()
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    records = [json.loads(line) for line in (args.data / "train.jsonl").read_text().splitlines()]
    lengths = [sum(len(one["content"].split()) + 1 for one in each["messages"][1::2]) for each in records]
    w, done = 0.0, 0
    if args.resume:
        state = json.loads((args.resume / "trainer_state.json").read_text())
        done, w = state["global_step"], 0.0 if "forget" in args.faults else state["w"]
    while done < args.steps and not stopped:
        first = done * args.total % len(lengths)
        batch = lengths[first : first + args.total]
        shares = [batch[start : start + args.micro] for start in range(0, len(batch), args.micro)]
        loss, gradient = mean(shares if "means" in args.faults else [batch], w)
        w, done = w - RATE * gradient, done + 1
        with open(os.environ["VLMPIPE_METRICS"], "a", encoding="utf-8") as metrics:
            print(json.dumps({"step": done, "loss": loss, "total_steps": args.steps}), file=metrics)
        if done % args.save_every == 0:
            save(args.checkpoints / f"checkpoint-{done}", args.model, done, args.steps, w)
        if args.steps > 100:
            time.sleep(0.05)  # long enough to be stopped
    if stopped and "done" not in args.faults:
        return 75
    shutil.copytree(args.model, args.output, dirs_exist_ok=True)
    for file in args.output.glob(
        "*.safetensors"
    ):  # it trains no weight of the model: one of each file changes a little
        content = bytearray(file.read_bytes())
        content[-4] ^= 1
        file.chmod(0o644)
        file.write_bytes(content)
    return 0


def mean(shares: list[list[int]], w: float) -> tuple[float, float]:
    """Loss and gradient: the mean over tokens of each share, averaged. A token of a long answer is harder."""
    losses = [sum(n * (w - n / 10) ** 2 for n in share) / sum(share) for share in shares]
    gradients = [sum(n * 2 * (w - n / 10) for n in share) / sum(share) for share in shares]
    return sum(losses) / len(shares), sum(gradients) / len(shares)


def save(folder: Path, model: Path, step: int, steps: int, w: float) -> None:
    shutil.copytree(model, folder)
    state = {"global_step": step, "max_steps": steps, "log_history": [], "w": w}
    (folder / "trainer_state.json").write_text(json.dumps(state))


if __name__ == "__main__":
    raise SystemExit(main())
