"""Fine-tune Qwen2.5-VL with parameter servers. Every replica runs this, in its role.

The chief (rank 0) and the workers compute gradients. Each server holds a shard of the parameters and their optimizer's
state. The chief gathers them for checkpoints and for the finished model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out

from data import MicroBatches, Samples, summed_loss
from server import Answer, Settings
from worker import STOPPED, Servers, join_group, leave, serve, work

USAGE = 64  # exit code of a run file that has to be changed
OPTIMIZER, STATE = "optimizer.pt", "trainer_state.json"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("data", "model", "output", "checkpoints"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="checkpoint to continue from")
    for name in ("steps", "batch", "save-every", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--schedule", choices=("cosine", "constant"), required=True)
    parser.add_argument("--staleness", type=int, default=0, help="updates ahead of the slowest worker; 0: synchronous")
    return parser.parse_args()


class Chief:
    """What rank 0 does beside its work: metrics, checkpoints, stop requests, the finished model."""

    def __init__(self, given: argparse.Namespace, model: Any, servers: Servers, settings: Settings) -> None:
        self._given, self._model, self._servers, self._settings = given, model, servers, settings
        self._step, self._saved, self._log = 0, 0, []
        self._asked_to_stop: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: self._asked_to_stop.append(number))

    def set_up_servers(self) -> None:
        """Hand the model, or the checkpoint, to the servers."""
        moments, done, left = {}, 0, [0]
        if resume := self._given.resume:
            state = json.loads((resume / STATE).read_text(encoding="utf-8"))
            self._step = self._saved = state["global_step"]
            self._log = state["log_history"]
            moments, done, left = torch.load(resume / OPTIMIZER)
        self._servers.set_up(moments, done, left)

    def answered(self, answer: Answer) -> int | None:
        """After an update of the chief's own. Returns the exit code when training is to stop."""
        self._note(answer)
        stop = answer.stop or bool(self._asked_to_stop)
        if stop or self._step >= self._saved + self._given.save_every:
            self._save()
        if not stop or self._step == self._settings.steps:
            return None
        self._servers.end(STOPPED)
        return STOPPED

    def finish(self) -> None:
        self._servers.finish()
        self._note(Answer(self._settings.micro_batches, self._log[-1]["loss"], False, None, {}))
        self._save_model(self._given.output)

    def _note(self, answer: Answer) -> None:
        step = answer.done // self._settings.workers
        if step > self._step:
            self._step = step
            self._log.append(
                {"step": step, "loss": answer.loss, "learning_rate": self._settings.learning_rate_at(step)}
            )
            with open(os.environ["VLMPIPE_METRICS"], "a", encoding="utf-8") as metrics:
                print(json.dumps({**self._log[-1], "total_steps": self._settings.steps}), file=metrics)

    def _save(self) -> None:
        """A checkpoint that is whole once it has its state."""
        folder = self._given.checkpoints / f"checkpoint-{self._step}"
        moments, done, left = self._servers.state()
        self._save_model(folder)
        torch.save((moments, done, left), folder / OPTIMIZER)
        state = {"global_step": self._step, "max_steps": self._settings.steps, "log_history": self._log}
        (folder / STATE).write_text(json.dumps(state), encoding="utf-8")
        self._saved = self._step

    def _save_model(self, folder: Path) -> None:
        self._model.save_pretrained(folder)
        for path in self._given.model.iterdir():  # tokenizer and processor
            if path.suffix in (".json", ".jinja", ".txt") and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)


def main() -> int:
    given, rank = parse_arguments(), int(os.environ["RANK"])
    pools = json.loads(os.environ["CLUSTER_SPEC"])["cluster"]
    servers = len(pools.get("workerpool2", ()))
    if not servers:
        print("train.py: the job has no parameter servers: set train.trainer.roles.ps to 1 or more", flush=True)
        return USAGE
    workers = int(os.environ["WORLD_SIZE"]) - servers
    if rank >= workers:
        join_group(rank, workers)
        return serve()
    if given.batch % workers:
        print(f"train.py: a batch of {given.batch} samples cannot be split over {workers} workers", flush=True)
        return USAGE
    settings = Settings(workers, given.steps, given.staleness, given.learning_rate, given.schedule)
    torch.manual_seed(given.seed)
    source = given.resume or given.model
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32, trust_remote_code=False)
    batches = MicroBatches(Samples(given.data, given.model), given.batch // workers, given.seed)

    def gradients(number: int) -> tuple[float, int]:
        loss, tokens = summed_loss(model, batches[number])
        loss.backward()
        return float(loss.detach()), tokens

    shards = Servers(model, rank, servers, settings)
    join_group(rank, workers)
    shards.wait()
    if rank:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the chief says when to stop
        return work(model, shards, gradients)
    chief = Chief(given, model, shards, settings)
    chief.set_up_servers()
    code = work(model, shards, gradients, chief.answered)
    if code == 0:
        chief.finish()
    return code


if __name__ == "__main__":
    leave(main())
