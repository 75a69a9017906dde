"""A training program of one's own under DeepSpeed's ZeRO-2, with its own sharded checkpoints."""

import os
import shutil

import deepspeed
import torch
import torch.distributed as dist
from samples import Samples, Stop, arguments, log, loss_of, rate_of
from transformers import AutoModelForImageTextToText

args, stop = arguments(), Stop()
deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed)
samples = Samples(args)
model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.float32)
model.model.vision_tower.requires_grad_(False)
settings = {
    "train_micro_batch_size_per_gpu": args.batch // world,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, args.learning_rate, weight_decay=0.01)
engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
done = 0
if args.resume:
    _, state = engine.load_checkpoint(args.resume)  # the tag that its `latest` names
    done = state["done"]


def save():
    """A checkpoint global_stepN, by every process: each writes its shard, and waits for the others."""
    engine.save_checkpoint(args.checkpoints, client_state={"done": done})
    if os.environ["LOCAL_RANK"] == "0":  # each node has its own disk
        for tag in sorted(args.checkpoints.glob("global_step*"), key=lambda path: path.stat().st_mtime)[:-2]:
            shutil.rmtree(tag)


asked = False
while done < args.steps and not asked:
    inputs, labels = samples.batch_of(done)
    for group in optimizer.param_groups:
        group["lr"] = rate_of(args, done)
    inputs, labels = {name: value.to(engine.device) for name, value in inputs.items()}, labels.to(engine.device)
    loss, mean, asked = loss_of(engine(**inputs).logits, labels, stop)
    engine.backward(loss)
    engine.step()
    done += 1
    log(args, done, mean)
    if done % args.save_every == 0 or asked:
        save()
if rank == 0 and done == args.steps:
    engine.module.save_pretrained(args.output)  # every process holds all weights under ZeRO-1 and ZeRO-2
    samples.processor.save_pretrained(args.output)
dist.barrier()
dist.destroy_process_group()
raise SystemExit(0 if done == args.steps else 75)
