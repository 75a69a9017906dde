"""Fine-tune Qwen2.5-VL with Horovod. Every process runs this; rank 0 writes metrics, checkpoints and the model."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from loop import Settings, optimizer_of, state_of, train
from transformers import AutoModelForImageTextToText

STOPPED = 75  # exit code of a run that saved a checkpoint and can be resumed
USAGE = 64  # and of a run file that has to be changed
OPTIMIZER, STATE = "optimizer.pt", "trainer_state.json"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("data", "model", "output", "checkpoints"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="checkpoint to continue from")
    for name in ("steps", "batch", "save-every", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True, help="of one process; multiplied by their number")
    parser.add_argument("--schedule", choices=("cosine", "constant"), required=True)
    parser.add_argument("--commit-every", type=int, default=10, help="steps that a lost process may cost, if elastic")
    parser.add_argument("--fp16-compression", action="store_true", help="send gradients as fp16")
    return parser.parse_args()


class Files:
    """What rank 0 writes."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given, self._noted, self._saved = given, 0, 0

    def resume(self, folder: Path, state: Any) -> None:
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
        state.optimizer.load_state_dict(torch.load(folder / OPTIMIZER))
        state.sampler.load_state_dict(content["sampler"])
        state.step, state.log = content["global_step"], content["log_history"]
        self._noted = self._saved = state.step

    def committed(self, state: Any) -> None:
        """Metrics of the steps since the last call, and a checkpoint when it is due."""
        with open(os.environ["VLMPIPE_METRICS"], "a", encoding="utf-8") as metrics:
            for made in state.log[self._noted :]:
                print(json.dumps({**made, "total_steps": self._given.steps}), file=metrics)
        self._noted = len(state.log)
        due = state.step // self._given.save_every > self._saved // self._given.save_every
        if state.stop or (due and state.step < self._given.steps):
            self._save(state)

    def _save(self, state: Any) -> None:
        """A checkpoint that is whole once it has its state."""
        folder = self._given.checkpoints / f"checkpoint-{state.step}"
        self.save_model(state.model, folder)
        torch.save(state.optimizer.state_dict(), folder / OPTIMIZER)
        content = {"global_step": state.step, "max_steps": self._given.steps, "log_history": state.log}
        (folder / STATE).write_text(json.dumps({**content, "sampler": state.sampler.state_dict()}), encoding="utf-8")
        self._saved = state.step

    def save_model(self, model: Any, folder: Path) -> None:
        model.save_pretrained(folder)
        for path in self._given.model.iterdir():  # tokenizer and processor
            if path.suffix in (".json", ".jinja", ".txt") and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parameter-server"))
    from data import Samples, summed_loss  # as there

    given = parse_arguments()
    hvd.init()
    processes = int(os.environ.get("NPROC_PER_NODE", hvd.size()))  # that were asked for: one may be lost just now
    if given.batch % processes:
        print(f"train.py: a batch of {given.batch} samples cannot be split over {processes} processes", flush=True)
        return USAGE
    settings = Settings(
        given.steps, given.batch // processes, given.learning_rate, given.schedule, commit_every=given.commit_every
    )
    source = given.resume or given.model
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32, trust_remote_code=False)
    samples, files = Samples(given.data, given.model), Files(given)
    state = state_of(model, optimizer_of(model, settings, fp16=given.fp16_compression), samples, given.seed)
    if given.resume:
        files.resume(given.resume, state)
        state.save()
    train(state, settings, lambda chosen: summed_loss(model, samples.batch(chosen)), files.committed)
    if state.step < given.steps:
        return STOPPED
    if hvd.rank() == 0:
        files.save_model(model, given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
