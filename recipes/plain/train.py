"""A training program of one's own: DistributedDataParallel, a Hugging Face model in and out, and nothing of vlmpipe."""

import argparse
import json
import math
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

parser = argparse.ArgumentParser()
for name in ("data", "model", "output", "checkpoints", "resume"):
    parser.add_argument(f"--{name}", type=Path)
for name, kind in (("steps", int), ("batch", int), ("save-every", int), ("seed", int), ("learning-rate", float)):
    parser.add_argument(f"--{name}", type=kind)
parser.add_argument("--schedule", choices=("cosine", "constant"))
args = parser.parse_args()

asked_to_stop = torch.zeros(1)
signal.signal(signal.SIGTERM, lambda *_: asked_to_stop.fill_(1))
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed)
processor = AutoProcessor.from_pretrained(args.model)
model = AutoModelForImageTextToText.from_pretrained(args.resume or args.model, dtype=torch.float32)
model.model.vision_tower.requires_grad_(False)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], args.learning_rate, weight_decay=0.01)
warmup = max(1, args.steps // 30)
falling = {"cosine": lambda n: 0.5 + 0.5 * math.cos(math.pi * n / args.steps), "constant": lambda n: 1.0}[args.schedule]
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / warmup, falling(n)))
samples = [json.loads(line) for line in (args.data / "train.jsonl").open(encoding="utf-8")]
done, log = 0, []
if args.resume:
    state = torch.load(args.resume / "optimizer.pt")
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    content = json.loads((args.resume / "trainer_state.json").read_text(encoding="utf-8"))
    done, log = content["global_step"], content["log_history"]


def tokens(text, images):
    return processor(text=text, images=images, return_tensors="pt")


def encode(sample):
    """A conversation's inputs, with labels on its answers and their end marks only."""
    images, messages = [Image.open(args.data / path) for path in sample["images"]], sample["messages"]
    template = processor.apply_chat_template
    inputs = tokens(template(messages), images)
    labels = torch.full_like(inputs["input_ids"][0], -100)
    for turn in (number for number, message in enumerate(messages) if message["role"] == "assistant"):
        start = tokens(template(messages[:turn], add_generation_prompt=True), images)["input_ids"].shape[1]
        end = tokens(template(messages[: turn + 1]).rstrip("\n"), images)["input_ids"].shape[1]
        labels[start:end] = inputs["input_ids"][0, start:end]
    return inputs["input_ids"][0], labels, inputs["pixel_values"]


def batch_of(step):
    """This rank's share of the step's global batch. The order depends on the seed and the epoch only."""
    epoch, place = divmod(step * args.batch, len(samples) - len(samples) % args.batch)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(args.seed + epoch))
    ids, labels, pixels = zip(
        *(encode(samples[n]) for n in order[place : place + args.batch][rank::world]), strict=True
    )
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(one) for one in ids], batch_first=True)
    return pad(ids, batch_first=True), pad(labels, batch_first=True, padding_value=-100), mask, torch.cat(pixels)


def save(folder):
    """A checkpoint: the model, and what a resume needs; trainer_state.json last, which makes it one."""
    model.save_pretrained(folder)
    torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, folder / "optimizer.pt")
    state = {"global_step": done, "max_steps": args.steps, "log_history": log}
    (folder / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")


while done < args.steps:
    ids, labels, mask, pixels = batch_of(done)
    logits = ddp(input_ids=ids, attention_mask=mask, pixel_values=pixels).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    total = torch.stack([loss.detach(), (labels[:, 1:] != -100).sum().float(), asked_to_stop[0]])
    dist.all_reduce(total)
    (loss * world / total[1]).backward()  # DDP divides by the ranks: the mean over all label tokens of the step
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    done += 1
    log.append({"step": done, "loss": float(total[0] / total[1]), "learning_rate": schedule.get_last_lr()[0]})
    if rank == 0:
        with open(os.environ["VLMPIPE_METRICS"], "a", encoding="utf-8") as metrics:
            print(json.dumps({**log[-1], "total_steps": args.steps}), file=metrics)
        if done % args.save_every == 0 or total[2]:
            save(args.checkpoints / f"checkpoint-{done}")
    if total[2]:
        break
if rank == 0 and done == args.steps:
    model.save_pretrained(args.output)
    processor.save_pretrained(args.output)
dist.barrier()
dist.destroy_process_group()
raise SystemExit(0 if done == args.steps else 75)
