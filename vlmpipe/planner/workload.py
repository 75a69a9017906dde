"""Workload of a run: how many packed sequences it trains on and what one holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.sequence_fill import LengthFill
from vlmpipe.planner.step_questions import StepQuestions
from vlmpipe.trainer.config.train import TrainConfig, warmup_problem
from vlmpipe.trainer.sizing.model_shape import ModelShape

# Best-fit packing in windows of 64 to 1024 samples: 95.5 to 99.3 % useful on lengths like a VLM's, and a goal of 97 %.
ASSUMED_FILL = 0.98


@dataclass(frozen=True)
class Workload:
    """Means over packed sequences. `samples` and `steps` are None if the amount of data is not known."""

    sequences_per_step: int
    sequence_length: int
    fill: float  # share of a sequence's tokens that are not padding
    samples_per_sequence: float
    sample_pairs_per_sequence: float  # pairs of tokens of one sample: sum of squared sample lengths
    images_per_sequence: float
    label_tokens_per_sequence: float
    sequences_per_epoch: int | None
    steps: int | None  # of the whole run
    samples: int | None
    epochs: int
    origin: str  # a sentence: where the figures come from
    image_tokens: int | None = None  # mean of an image; None if all have the number in the model's shape
    fills: tuple[LengthFill, ...] = ()  # by sequence length, of prepared data
    is_prepared: bool = False  # figures are those of prepared data, none is assumed
    replayed: int | None = None  # the start model's answers, where an earlier run generated them
    step_questions: StepQuestions | None = None  # of prepared data whose samples share prefixes
    # Tokens and images of a mean sample by itself, where a sequence has fewer of each than its samples have.
    whole_sample: tuple[float, float] | None = None
    # Tokens of prepared data as a multiple of those with shared prefixes, where `data.share_prefix` auto is off.
    separate_cost: float | None = None
    asked_together: float = 1.0  # validation questions whose prompts begin with the same images, of prepared data

    @property
    def useful_tokens_per_sequence(self) -> float:
        return self.fill * self.sequence_length

    @property
    def sample_tokens(self) -> float:
        """Tokens of a mean sample by itself."""
        return (
            self.whole_sample[0] if self.whole_sample else self.useful_tokens_per_sequence / self.samples_per_sequence
        )

    @property
    def sample_images(self) -> float:
        """Images of a mean sample by itself."""
        return self.whole_sample[1] if self.whole_sample else self.images_per_sequence / self.samples_per_sequence

    @property
    def images_per_epoch(self) -> float | None:
        """Images of an epoch; repeated ones count each time."""
        return None if self.sequences_per_epoch is None else self.sequences_per_epoch * self.images_per_sequence

    @property
    def passes(self) -> float:
        """Epochs that are trained: fewer than asked for if max_steps ends the run early."""
        if self.steps is None or self.sequences_per_epoch is None:
            return float(self.epochs)
        return min(float(self.epochs), self.steps * self.sequences_per_step / self.sequences_per_epoch)

    def warmup_problem(self, train: TrainConfig) -> str:
        """Problem of a warm-up of more steps than the run has; empty for none, and where they are not known."""
        problem = warmup_problem(train, self.steps or 0)
        how = "" if self.is_prepared else " (the plan section's samples)"
        return f"train.{problem}{how}" if problem else ""

    def sized(self, shape: ModelShape) -> ModelShape:
        """The model with images of this workload's mean size, for time and cost."""
        return shape if self.image_tokens is None else shape.of_images(self.image_tokens)

    @classmethod
    def from_index(
        cls,
        config: RunConfig,
        *,
        samples: int,
        tokens: int,
        pairs: int,
        images: int,
        image_tokens: int,
        label_tokens: int,
        sequences: int,
        steps: int,
        fills: tuple[LengthFill, ...] = (),
        step_questions: StepQuestions | None = None,
        whole_sample: tuple[float, float] | None = None,
    ) -> Workload:
        """From the prepared data's index: sums over the training split (`pairs`: of squared sample lengths), packed
        sequences of its first epoch (`sequences`), steps of the run."""
        return cls(
            sequences_per_step=config.train.global_batch_size,
            sequence_length=config.data.sequence_length,
            fill=tokens / (sequences * config.data.sequence_length),
            samples_per_sequence=samples / sequences,
            sample_pairs_per_sequence=pairs / sequences,
            images_per_sequence=images / sequences,
            label_tokens_per_sequence=label_tokens / sequences,
            sequences_per_epoch=sequences,
            steps=steps,
            samples=samples,
            epochs=config.train.epochs,
            origin=f"Packed sequences are those of the prepared data: {samples:,} samples in {sequences:,} sequences.",
            image_tokens=max(1, round(image_tokens / images)) if images else None,
            fills=fills,
            is_prepared=True,
            step_questions=step_questions,
            whole_sample=whole_sample,
        )

    @classmethod
    def assumed(cls, config: RunConfig, shape: ModelShape) -> Workload:
        """Return the workload of the plan section. Without plan.samples only the step time is known.

        Unknown values are taken as the most that a step can compute: without plan.sample_tokens a packed sequence is
        one sample full of images; all text tokens are labels; an image is as large as the model and its sample allow.
        """
        plan, data, train = config.plan, config.data, config.train
        samples = math.ceil(data.train_share * min(plan.samples, data.max_samples or plan.samples)) or None
        image_tokens = shape.image_tokens
        if not plan.sample_tokens:
            image_tokens = min(image_tokens, data.sequence_length) if shape.images_differ else image_tokens
            images = min(data.max_images_per_sequence, data.sequence_length // image_tokens)
            samples_per_sequence, images_per_sequence, fill = float(max(1, images)), float(images), ASSUMED_FILL
            origin = f"Sample lengths are not known: a packed sequence is taken as one sample with {images} images."
            sequences = None
        else:
            sample_tokens = min(plan.sample_tokens, data.sequence_length)
            if shape.images_differ and plan.sample_images:
                image_tokens = max(1, min(image_tokens, int(sample_tokens / plan.sample_images)))
            samples_per_sequence = ASSUMED_FILL * data.sequence_length / sample_tokens if data.pack else 1.0
            if plan.sample_images:
                samples_per_sequence = min(samples_per_sequence, data.max_images_per_sequence / plan.sample_images)
            images_per_sequence = samples_per_sequence * plan.sample_images
            fill = samples_per_sequence * sample_tokens / data.sequence_length
            sequences = math.ceil(samples / samples_per_sequence) if samples else None
            origin = (
                f"Each sample is taken as {plan.sample_tokens:,} tokens with {plan.sample_images:g} images (plan "
                f"section), a packed sequence as {fill:.0%} filled"
                + (f": {samples:,} samples in {sequences:,} sequences." if sequences else ".")
            )
        if shape.images_differ:
            origin += f" An image is taken as {image_tokens:,} tokens, the most that it can have."
        steps = train.epochs * math.ceil(sequences / train.global_batch_size) if sequences else train.max_steps or None
        if steps and train.max_steps:
            steps = min(steps, train.max_steps)
        return cls(
            sequences_per_step=train.global_batch_size,
            sequence_length=data.sequence_length,
            fill=fill,
            samples_per_sequence=samples_per_sequence,
            sample_pairs_per_sequence=(fill * data.sequence_length) ** 2
            / (samples_per_sequence if plan.sample_tokens else 1),
            images_per_sequence=images_per_sequence,
            label_tokens_per_sequence=max(0.0, fill * data.sequence_length - images_per_sequence * image_tokens),
            sequences_per_epoch=sequences,
            steps=steps,
            samples=samples,
            epochs=train.epochs,
            origin=origin,
            image_tokens=image_tokens if shape.images_differ else None,
        )


def is_cached(config: RunConfig) -> bool:
    """Return whether training reads the tower's output instead of running it."""
    return config.features.cache == "on" or (config.features.cache == "auto" and config.model.caches_if_auto)
