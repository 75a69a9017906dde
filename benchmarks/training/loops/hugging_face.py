"""Hugging Face's Trainer on the same model, packed sequences and optimizer as our loop."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.support.timing import Clock, Measured
from benchmarks.support.workloads import Workload
from benchmarks.training.loops.our_loop import Length, Trained
from vlmpipe.trainer.data.loader import PackedSequence
from vlmpipe.trainer.models.image_processor import PixelPreparer
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.optimizer.build import build_optimizer


class PlannedSequences(Dataset[PackedSequence]):
    """The packed sequences of the first steps, in the order of our loop; each is made when it is asked for."""

    def __init__(self, load: Workload, steps: int) -> None:
        self._loader, self._members = load.loader(), []
        sequence = load.sequence()
        for step in range(steps):
            batch = sequence.batch(step)
            assert len(batch) == sequence.global_batch_size, "too few samples: the last batch of an epoch is short"
            plan = sequence.plan(batch.epoch)
            self._members += [plan.members_of(number).tolist() for number in range(batch.start, batch.stop)]

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, number: int) -> PackedSequence:
        return self._loader.pack_sequence(self._members[number])


class StepClock(TrainerCallback):
    """The same clock for Hugging Face's Trainer: from the start of one step to the start of another."""

    def __init__(self, length: Length) -> None:
        self._length, self._clock = length, Clock()
        self.measured: Measured | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._length.warm_up:
            self._clock = Clock()
        if state.global_step == self._length.end:
            self.measured = self._clock.stop(self._length.steps)


def hugging_face_trainer(load: Workload, length: Length, scratch: Path) -> Trained:
    """`transformers.Trainer` on the same LlavaForConditionalGeneration, optimizer, sequences and collated images."""
    job = load.online
    model = family_of(job.model).build(job.model, load.chat.tokenizer)
    # The Trainer turns use_cache off for the whole model only (5.23). With the language model's own left on, a cache is
    # passed along, packed samples are no longer kept apart, and the losses differ from the first step.
    model.config.text_config.use_cache = False
    if model.config.vision_feature_layer == 0:  # 5.23 takes 0 for "no layer wanted"; counted from the end it is heard
        model.config.vision_feature_layer = -1 - model.config.vision_config.num_hidden_layers
    # Features are rounded to bf16 as ours are.
    projector = model.model.multi_modal_projector
    projector.register_forward_pre_hook(lambda _module, inputs: (inputs[0].bfloat16().float(),))
    losses: list[Tensor] = []
    model.register_forward_hook(lambda _module, _inputs, output: losses.append(output.loss.detach()))
    pixels = PixelPreparer(job.model)

    def collate(sequences: Sequence[PackedSequence]) -> dict[str, Tensor]:
        names = ("input_ids", "labels", "position_ids")
        batch = {name: torch.from_numpy(np.stack([getattr(each, name) for each in sequences])) for name in names}
        return batch | {"pixel_values": pixels([image for each in sequences for image in each.images])}

    settings = job.train
    accumulation = settings.global_batch_size // settings.micro_batch_size
    arguments = TrainingArguments(
        output_dir=str(scratch),
        max_steps=length.end + 1,
        per_device_train_batch_size=settings.micro_batch_size,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=settings.clip_grad_norm,
        train_sampling_strategy="sequential",
        logging_steps=settings.log_every_steps,
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    optimizer, clock = build_optimizer(model, settings.optimizer), StepClock(length)
    trainer = Trainer(
        model,
        arguments,
        data_collator=collate,
        train_dataset=PlannedSequences(load, length.end + 1),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)),
        callbacks=[clock],
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    assert clock.measured
    # The loss of a step is the sum of its micro-batches' shares.
    steps = torch.stack(losses).view(-1, accumulation).sum(1)
    return Trained(clock.measured, steps[: length.end].tolist())
