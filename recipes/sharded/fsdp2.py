"""A training program of one's own under FSDP2 (fully_shard), with checkpoints of torch.distributed.checkpoint."""

import os
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from samples import Samples, Stop, arguments, log, loss_of, rate_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForImageTextToText

args, stop = arguments(), Stop()
on_gpus = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
if on_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpus else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed)
samples = Samples(args)
model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.float32).to(device)
model.model.vision_tower.requires_grad_(False)
mesh = torch.distributed.init_device_mesh(device.type, (world,))
for layer in model.model.language_model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, args.learning_rate, weight_decay=0.01)
done = 0
if args.resume:  # of any number of processes: each reads what its shards need
    weights, moments = get_state_dict(model, optimizer)
    state = {"weights": weights, "moments": moments, "done": torch.zeros(1, dtype=torch.int64)}
    dcp.load(state, checkpoint_id=args.resume)
    set_state_dict(model, optimizer, model_state_dict=state["weights"], optim_state_dict=state["moments"])
    done = int(state["done"])


def save():
    """A checkpoint step-N, by every process: each writes its shards, and the first one .metadata at last."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"weights": weights, "moments": moments, "done": torch.tensor([done])}
    dcp.save(state, checkpoint_id=args.checkpoints / f"step-{done}")
    if os.environ["LOCAL_RANK"] == "0":  # each node has its own disk
        for folder in sorted(args.checkpoints.glob("step-*"), key=lambda path: path.stat().st_mtime)[:-2]:
            shutil.rmtree(folder)


asked = False
while done < args.steps and not asked:
    inputs, labels = samples.batch_of(done)
    for group in optimizer.param_groups:
        group["lr"] = rate_of(args, done)
    inputs, labels = {name: value.to(device) for name, value in inputs.items()}, labels.to(device)
    loss, mean, asked = loss_of(model(**inputs).logits, labels, stop)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    done += 1
    log(args, done, mean)
    if done % args.save_every == 0 or asked:
        save()
if done == args.steps:
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        whole = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.float32)
        whole.load_state_dict(weights)
        whole.save_pretrained(args.output)
        samples.processor.save_pretrained(args.output)
dist.barrier()
dist.destroy_process_group()
raise SystemExit(0 if done == args.steps else 75)
