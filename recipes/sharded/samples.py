"""What zero2.py and fsdp2.py share: arguments, batches of conversations, the log, and stopping together."""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image
from transformers import AutoProcessor

IGNORED = -100


def arguments():
    parser = argparse.ArgumentParser()
    for name in ("data", "model", "output", "checkpoints", "resume"):
        parser.add_argument(f"--{name}", type=Path)
    for name, kind in (("steps", int), ("batch", int), ("save-every", int), ("seed", int), ("learning-rate", float)):
        parser.add_argument(f"--{name}", type=kind)
    return parser.parse_args()


class Stop:
    """A stop request (SIGTERM) that all processes heed after the same step."""

    def __init__(self):
        self.asked = torch.zeros(1)
        signal.signal(signal.SIGTERM, lambda *_: self.asked.fill_(1))


class Samples:
    """The training split. A step's global batch depends on the seed and the step only, on any number of processes."""

    def __init__(self, args):
        self.folder, self.seed, self.batch = args.data, args.seed, args.batch
        self.processor = AutoProcessor.from_pretrained(args.model)
        self.samples = [json.loads(line) for line in (args.data / "train.jsonl").open(encoding="utf-8")]

    def batch_of(self, step):
        """This process's share of a step's batch: the model's inputs, and labels."""
        epoch, place = divmod(step * self.batch, len(self.samples) - len(self.samples) % self.batch)
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(self.seed + epoch))
        mine = order[place : place + self.batch][dist.get_rank() :: dist.get_world_size()]
        ids, labels, pixels = zip(*(self._encode(self.samples[n]) for n in mine), strict=True)
        pad = torch.nn.utils.rnn.pad_sequence
        mask = pad([torch.ones_like(one) for one in ids], batch_first=True)
        inputs = {"input_ids": pad(ids, batch_first=True), "attention_mask": mask, "pixel_values": torch.cat(pixels)}
        return inputs, pad(labels, batch_first=True, padding_value=IGNORED)

    def _encode(self, sample):
        """A conversation's tokens, with labels on its answers and their end marks only."""
        images, messages = [Image.open(self.folder / path) for path in sample["images"]], sample["messages"]
        template = self.processor.apply_chat_template
        inputs = self._tokens(template(messages), images)
        labels = torch.full_like(inputs["input_ids"][0], IGNORED)
        for turn in (number for number, message in enumerate(messages) if message["role"] == "assistant"):
            start = self._tokens(template(messages[:turn], add_generation_prompt=True), images)["input_ids"].shape[1]
            end = self._tokens(template(messages[: turn + 1]).rstrip("\n"), images)["input_ids"].shape[1]
            labels[start:end] = inputs["input_ids"][0, start:end]
        return inputs["input_ids"][0], labels, inputs["pixel_values"]

    def _tokens(self, text, images):
        return self.processor(text=text, images=images, return_tensors="pt")


def loss_of(logits, labels, stop):
    """The loss to differentiate, the mean over all processes' labels, and whether a process is asked to stop.

    Gradients are averaged over processes, so that the loss is multiplied by their number.
    """
    summed = torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    total = torch.stack([summed.detach(), (labels[:, 1:] != IGNORED).sum().float(), stop.asked[0]])
    dist.all_reduce(total)
    return summed * dist.get_world_size() / total[1], float(total[0] / total[1]), bool(total[2])


def rate_of(args, step):
    """The learning rate of a step: a short warm-up, then a line down to zero."""
    warmup = max(1, args.steps // 30)
    return args.learning_rate * min((step + 1) / warmup, (args.steps - step) / args.steps)


def log(args, step, loss):
    if dist.get_rank() == 0:
        with open(os.environ["VLMPIPE_METRICS"], "a", encoding="utf-8") as metrics:
            line = {"step": step, "loss": loss, "learning_rate": rate_of(args, step - 1), "total_steps": args.steps}
            print(json.dumps(line), file=metrics)
