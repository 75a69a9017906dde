"""Fine-tune Qwen2.5-VL with Megatron-core, data- and tensor-parallel. torchrun starts every process."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from layout import USAGE, Layout, problems
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from model import VisionLanguageModel, allow_cpus
from transformers import AutoConfig

STOPPED = 75  # exit code of a run that saved a checkpoint and can be resumed
OPTIMIZER, STATE = "optimizer.pt", "trainer_state.json"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("data", "model", "output", "checkpoints"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="checkpoint to continue from")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="processes that share the language model")
    for name in ("steps", "batch", "micro-batch", "save-every", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("learning-rate", "weight-decay", "clip-norm"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--schedule", choices=("cosine", "constant"), required=True)
    parser.add_argument("--precision", required=True, help="fp32 or bf16; sums and AdamW are in fp32")
    return parser.parse_args()


class Optimizer:
    """AdamW on fp32 copies of the parameters, from the gradients that Megatron-core has summed."""

    def __init__(self, given: argparse.Namespace, model: VisionLanguageModel) -> None:
        self._given, self._model = given, model
        self._trained = dict(model.named_parameters())
        self.copies = {name: one.detach().float().clone() for name, one in self._trained.items()}
        self._adam = torch.optim.AdamW(self.copies.values(), weight_decay=given.weight_decay)

    def step(self, number: int) -> float:
        """Returns the learning rate of step `number`, from 0."""
        gradients = {name: one.main_grad for name, one in self._trained.items()}
        scale = min(1.0, self._given.clip_norm / (self._norm(gradients) + 1e-6)) if self._given.clip_norm else 1.0
        rate = self._rate(number)
        self._adam.param_groups[0]["lr"] = rate
        for name, copy in self.copies.items():
            copy.grad = gradients[name] * scale
        self._adam.step()
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(self.copies[name])
        return rate

    def state(self) -> dict[str, Any]:
        """By Hugging Face's names, whole. Every process takes part."""
        moments = {
            key: self._model.gather({name: self._adam.state[copy][key] for name, copy in self.copies.items()})
            for key in ("exp_avg", "exp_avg_sq")
        }
        return {"weights": self._model.gather(self.copies), **moments}

    def load_state(self, state: dict[str, Any], step: int) -> None:
        for key in ("weights", "exp_avg", "exp_avg_sq"):
            for name, tensor in self._model.scatter(state[key]).items():
                copy = self.copies[name]
                if key == "weights":
                    copy.copy_(tensor)
                else:
                    self._adam.state[copy][key] = tensor.clone().to(copy.device)
                    self._adam.state[copy]["step"] = torch.tensor(float(step))

    def _norm(self, gradients: dict[str, torch.Tensor]) -> float:
        """Of all gradients: those of shards are summed over their group, others are whole in every process."""
        squares = torch.zeros(2, device=next(iter(gradients.values())).device)
        for name in self._trained:
            squares[int(self._model.is_sharded(name))] += gradients[name].square().sum()
        shards = squares[1:]
        dist.all_reduce(shards, group=parallel_state.get_tensor_model_parallel_group())
        return math.sqrt(float(squares[0] + shards[0]))

    def _rate(self, number: int) -> float:
        steps = self._given.steps
        falling = 0.5 + 0.5 * math.cos(math.pi * number / steps) if self._given.schedule == "cosine" else 1.0
        return float(self._given.learning_rate * min((number + 1) / max(1, steps // 30), falling))


class Training:
    """The loop, and what rank 0 writes."""

    def __init__(self, given: argparse.Namespace, layout: Layout, batches: Any, device: torch.device) -> None:
        self._given, self._layout, self._batches, self._device = given, layout, batches, device
        self._model = VisionLanguageModel(given.resume or given.model, layout).to(device)
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self._ddp = DistributedDataParallel(self._model.config, settings, self._model)
        self._optimizer = Optimizer(given, self._model)
        self._step, self._log, self._asked_to_stop = 0, [], torch.zeros(1, device=device)
        if given.resume:
            content = json.loads((given.resume / STATE).read_text(encoding="utf-8"))
            self._step, self._log = content["global_step"], content["log_history"]
            self._optimizer.load_state(torch.load(given.resume / OPTIMIZER), self._step)
        signal.signal(signal.SIGTERM, lambda *_: self._asked_to_stop.fill_(1))

    def run(self) -> int:
        stop = False
        while self._step < self._given.steps and not stop:
            stop = self._make_step()
            if stop or self._step % self._given.save_every == 0:
                self._save_checkpoint()
        if self._step < self._given.steps:
            return STOPPED
        self._save_model(self._model.gather(self._optimizer.copies), self._given.output)
        return 0

    def _make_step(self) -> bool:
        """Whether some process was asked to stop."""
        self._ddp.zero_grad_buffer()
        total, tokens = torch.zeros((), device=self._device), torch.zeros((), dtype=torch.int, device=self._device)
        replica = parallel_state.get_data_parallel_rank()
        for number in range(self._layout.micro_batches):
            place = (self._step * self._layout.micro_batches + number) * self._layout.data_parallel + replica
            batch = {name: one.to(self._device) for name, one in self._batches[place].items()}
            loss, counted = self._ddp(batch)
            loss.backward()
            total, tokens = total + loss.detach(), tokens + counted.int()
        finalize_model_grads([self._ddp], tokens)  # summed over the replicas, divided by the tokens of all
        rate = self._optimizer.step(self._step)
        stop = self._asked_to_stop.clone()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        dist.all_reduce(stop)
        self._step += 1
        self._log.append({"step": self._step, "loss": float(total / tokens), "learning_rate": rate})
        if dist.get_rank() == 0:
            with open(os.environ["VLMPIPE_METRICS"], "a", encoding="utf-8") as metrics:
                print(json.dumps({**self._log[-1], "total_steps": self._given.steps}), file=metrics)
        return bool(stop)

    def _save_checkpoint(self) -> None:
        """A checkpoint is whole once it has its state."""
        state, folder = self._optimizer.state(), self._given.checkpoints / f"checkpoint-{self._step}"
        self._save_model(state["weights"], folder)
        if dist.get_rank() == 0:
            torch.save(state, folder / OPTIMIZER)
            content = {"global_step": self._step, "max_steps": self._given.steps, "log_history": self._log}
            (folder / STATE).write_text(json.dumps(content), encoding="utf-8")

    def _save_model(self, whole: dict[str, torch.Tensor], folder: Path) -> None:
        if dist.get_rank() == 0:
            self._model.save(whole, folder)
            for path in self._given.model.iterdir():  # tokenizer and processor
                if path.suffix in (".json", ".jinja", ".txt") and not (folder / path.name).exists():
                    shutil.copyfile(path, folder / path.name)


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parameter-server"))
    from data import MicroBatches, Samples  # as there

    given = parse_arguments()
    layout = Layout(
        int(os.environ["WORLD_SIZE"]), given.tensor_parallel, given.batch, given.micro_batch, given.precision
    )
    for problem in (found := problems(AutoConfig.from_pretrained(given.model, trust_remote_code=False), layout)):
        print(f"train.py: {problem}", flush=True)
    if found:
        return USAGE
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        allow_cpus()
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=given.tensor_parallel)
    torch.manual_seed(given.seed)
    batches = MicroBatches(Samples(given.data, given.model), layout.micro_batch, given.seed)
    code = Training(given, layout, batches, device).run()
    dist.barrier()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
