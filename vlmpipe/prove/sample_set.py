"""The generated samples: small images, and answers of 4 to 14 label tokens that differ in length and in words."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

NUM_SAMPLES, NUM_VALIDATION = 32, 2
SIDE = 56  # pixels: trainers that resize images for Qwen2.5-VL do so to multiples of 28
COLOURS = ("red", "green", "blue", "white", "black", "grey", "pink", "brown")


@dataclass(frozen=True)
class Sample:
    """An image, if any, and one question with its answer, or two."""

    id: str
    image: Path | None
    turns: tuple[tuple[str, str], ...]


def write_samples(folder: Path, *, text_only: bool = False) -> list[Sample]:
    """Write samples for training and validation as `samples.json`, in LLaVA's format. Returns those for training.

    text_only: every other sample has no image.
    """
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    samples = [
        _sample(folder, draw, number, has_image=not (text_only and number % 2))
        for number in range(NUM_SAMPLES + NUM_VALIDATION)
    ]
    records = [_record(sample, "train" if number < NUM_SAMPLES else "eval") for number, sample in enumerate(samples)]
    (folder / "samples.json").write_text(json.dumps(records), encoding="utf-8")
    return samples[:NUM_SAMPLES]


def _sample(folder: Path, draw: random.Random, number: int, *, has_image: bool) -> Sample:
    image = folder / f"{number:02d}.png" if has_image else None
    if image:
        noise = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(noise).save(image)
    turns = [("What do you see?", _answer(draw, number))]
    if number % 4 == 3:
        turns.append(("And below?", _answer(draw, number + 1)))
    return Sample(f"sample-{number:02d}", image, tuple(turns))


def _answer(draw: random.Random, number: int) -> str:
    """Three to 13 words, each one token of the tiny tokenizer; the end mark is one more."""
    return " ".join(draw.choice(COLOURS) for _ in range(3 + 5 * number % 11))


def _record(sample: Sample, split: str) -> dict[str, object]:
    texts = [text for turn in sample.turns for text in turn]
    if sample.image:
        texts[0] = f"<image>\n{texts[0]}"
    spoken = [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(texts)]
    image = {"image": sample.image.name} if sample.image else {}
    return {"id": sample.id, "split": split, "conversations": spoken, **image}
