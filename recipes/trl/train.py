"""Fine-tune a vision-language model with TRL: on answers (SFT), or on preferences (DPO) where the data are pairs.

torchrun starts it; run.yaml has its command. TRL sees no network: model and data are folders.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Image, List, load_dataset
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

STOPPED = 75  # exit code of a run that saved a checkpoint and can be resumed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("data", "model", "output", "checkpoints"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--resume", help="checkpoint to continue from")
    parser.add_argument("--beta", type=float, default=0.1, help="DPO: weight of staying close to the given model")
    for name in ("max-steps", "micro-batch-size", "accumulation", "save-steps", "sequence-length", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("learning-rate", "warmup-fraction", "clip-norm"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--schedule", choices=("cosine", "linear", "constant"), required=True)
    return parser.parse_args()


def read_data(folder: Path) -> Dataset:
    """Training samples of `vlmpipe data export --format trl`. Images are decoded when they are used."""
    data = load_dataset("json", data_files=str(folder / "train.jsonl"), split="train")
    data = data.map(lambda row: {"images": [str(folder / name) for name in row["images"]]})
    return data.cast_column("images", List(Image()))


class Metrics(TrainerCallback):
    """Writes what vlmpipe shows while training runs."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            line = {"step": state.global_step, "total_steps": state.max_steps, **logs}
            with Path(os.environ["VLMPIPE_METRICS"]).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def shared_settings(given: argparse.Namespace) -> dict[str, Any]:
    has_gpu = torch.cuda.is_available()
    return {
        "output_dir": str(given.checkpoints),
        "max_steps": given.max_steps,
        "per_device_train_batch_size": given.micro_batch_size,
        "gradient_accumulation_steps": given.accumulation,
        "learning_rate": given.learning_rate,
        "lr_scheduler_type": "constant_with_warmup" if given.schedule == "constant" else given.schedule,
        "warmup_steps": given.warmup_fraction,  # below 1 it is a fraction of max_steps
        "max_grad_norm": given.clip_norm,
        "max_length": given.sequence_length,
        "seed": given.seed,
        "save_steps": given.save_steps,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not has_gpu,
        "bf16": has_gpu,
        "activation_checkpointing": has_gpu,
        "enable_jit_checkpoint": True,  # SIGTERM: save, then end; without it a stopped run leaves nothing
    }


def main() -> None:
    given = parse_arguments()
    data = read_data(given.data)
    model = AutoModelForImageTextToText.from_pretrained(given.model, dtype=torch.float32)
    own = {
        "model": model,
        "train_dataset": data,
        "processing_class": AutoProcessor.from_pretrained(given.model),
        "callbacks": [Metrics()],
    }
    if "chosen" in data.column_names:
        trainer = DPOTrainer(args=DPOConfig(beta=given.beta, **shared_settings(given)), **own)
    else:
        # Qwen2.5-VL's class says that it cannot divide by the label tokens of the whole step, and it can. Without this
        # each process and each micro-batch is averaged by itself, and the result depends on how many there are.
        model.accepts_loss_kwargs = True
        # Without assistant_only_loss the loss counts the questions, too.
        trainer = SFTTrainer(args=SFTConfig(assistant_only_loss=True, **shared_settings(given)), **own)
    trainer.train(resume_from_checkpoint=given.resume)
    if trainer.state.global_step < trainer.state.max_steps:
        sys.exit(STOPPED)
    trainer.save_model(str(given.output))


if __name__ == "__main__":
    main()
