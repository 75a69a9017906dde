"""Part `shared-pairs`: a step on preference pairs, with each prompt computed once and with each answer."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import Clock, Measured, close
from benchmarks.support.workloads import Workload, workload
from benchmarks.training.nanovlm import PATCH
from benchmarks.training.prefixes.packed_steps import PackedSteps
from benchmarks.training.ready_steps import cached_source
from benchmarks.training.workloads import TOLERANCE
from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.dataloading.batches import PackedBatch, collate
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.setup.training import build_training

IMAGE_TOKENS = 256
SETTINGS = (
    "model.language_model.config.hidden_size=256",
    "model.language_model.config.intermediate_size=704",
    "model.language_model.config.num_key_value_heads=2",
    "model.language_model.config.max_position_embeddings=8192",
    "data.max_images_per_sequence=1024",
    "train.global_batch_size=1",
    "train.micro_batch_size=1",
)
WORDS = [f"{first}{second}" for first in "bdfgklmn" for second in ("ar", "en", "is", "ol", "ut")]
ONCE, TWICE = "each prompt once", "a prompt with each answer"
NOTE = (
    f"Preference pairs: images of noise with {IMAGE_TOKENS} tokens and cached features, prompts and answers of drawn "
    "words; forward and backward pass of SimPO over all pairs, and an update. DPO's step with stored references has "
    "the same passes. The ideal is the ratio of the tokens: of a pair by itself 2 (P + a) / (P + 2 a) for answers of a "
    "tokens behind a prompt of P."
)


@dataclass(frozen=True)
class Kind:
    """Pairs of which both sides fill sequences about equally."""

    name: str
    answer_words: int
    pairs: int  # about each image
    images: int
    sequence_tokens: int


FULL = (
    Kind("answers of 30 words", 30, 1, 28, 2560),
    Kind("answers of 120 words", 120, 1, 15, 2688),
    Kind("three pairs an image, answers of 30 words", 30, 3, 20, 2688),
)
QUICK = (Kind("answers of 10 words", 10, 2, 3, 2048),)


class ReferencePass(PackedSteps):
    """Log probabilities of all answers, without gradients."""

    def __call__(self) -> Measured:
        clock = Clock()
        found = [self.strategy.forward_loss(batch).sum().item() for batch in self.batches]
        self.first_loss = sum(found) if self.first_loss is None else self.first_loss
        return clock.stop(self.totals.samples)


def shared_pairs(bench: Bench) -> None:
    """Equal pairs, model, weights and loss on both sides."""
    kinds = QUICK if bench.quick else FULL
    bench.expect(len(kinds) + 1)
    for number, kind in enumerate(kinds):
        source = write_pairs(bench.scratch / f"pairs-{number}", kind)
        side = round(IMAGE_TOKENS**0.5) * PATCH
        settings = (
            *SETTINGS, f"data.source={source}", f"data.sequence_length={kind.sequence_tokens}",
            f"model.image_size={side}", "model.tokenizer=train:800", "train.objective=simpo",
            "train.validate_every_steps=0",
        )  # fmt: skip
        steps, passes = dict[str, PackedSteps](), dict[str, PackedSteps]()
        for name, on in ((ONCE, "on"), (TWICE, "off")):  # one by one: runs of a run file have one folder
            load = workload(bench, "easy-vqa", (*settings, f"data.share_prefix={on}"), name=f"{kind.name}, {name}")
            steps[name] = pairs(load, bench.worker)
            if not number:
                passes[name] = pairs(load, bench.worker, is_reference=True)
        compared(bench, kind, steps, "a pair's step")
        if passes:
            compared(bench, kind, passes, "a pair's pass under the reference")
    bench.report.note(NOTE)


def compared(bench: Bench, kind: Kind, sides: dict[str, PackedSteps], what: str) -> None:
    """Both sides in turns."""
    totals = {name: side.totals for name, side in sides.items()}
    fills = {name: of.tokens / of.sequences / kind.sequence_tokens for name, of in totals.items()}
    data = f"{kind.name}; sequences {fills[ONCE]:.0%} and {fills[TWICE]:.0%} full"
    found = bench.take_turns(f"{what}, {kind.name}", sides)
    losses = [[side.first_loss or math.nan] for side in sides.values()]
    is_same = totals[ONCE].samples == totals[TWICE].samples and close(losses[0], losses[1], TOLERANCE)
    law = f"the same pairs, and the same loss before the first update (relative {TOLERANCE:g})"
    bench.report.require(is_same, law, found=str(losses))
    claim = f"{what}: prompts computed once or with each answer"
    bench.report.compare_rates(claim, data, "pairs", (ONCE, found[ONCE]), (TWICE, found[TWICE]))
    ideal = totals[TWICE].tokens / totals[ONCE].tokens
    reached = [other.cpu_per_unit / own.cpu_per_unit for own, other in zip(found[ONCE], found[TWICE], strict=True)]
    shares = Side(f"of {ideal:.2f}", [100 * ratio / ideal for ratio in reached])
    bench.report.figure(f"speed of shared prompts, of the ideal; {what}", data, "%", shares)


def pairs(load: Workload, worker: ProcessContext, *, is_reference: bool = False) -> PackedSteps:
    """Those of the first epoch."""
    job, split = load.cached, load.split()
    sampler = PackedBatchSampler.of_training(split, job)
    loader, images = PackedLoader(split, sampler, load.chat, load.reader()), cached_source(load)
    training = build_training(job, worker)
    loader.references = None if is_reference else training.loader.references
    rows = [row for step in range(sampler.num_steps(1)) for row in loader.sequences_for_step(step, 0, 1)]
    batches: list[PackedBatch] = [collate([row], images) for row in rows]
    side = ReferencePass if is_reference else PackedSteps
    totals = sampler.totals(0)
    return side(training.strategy, batches, totals, totals.samples)


def write_pairs(folder: Path, kind: Kind) -> Path:
    """LLaVA records with a rejected answer, and an image with as many for validation."""
    drawn = np.random.default_rng(0)

    def words(count: int) -> str:
        return " ".join(drawn.choice(WORDS, count))

    records = []
    folder.mkdir(parents=True)
    side = round(IMAGE_TOKENS**0.5) * PATCH
    for number in range(kind.images + 1):
        buffer = io.BytesIO()
        Image.fromarray(drawn.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(buffer, "PNG")
        (folder / f"{number}.png").write_bytes(buffer.getvalue())
        for place in range(kind.pairs):
            said = [("human", f"<image>\n{words(24)}"), ("gpt", words(kind.answer_words))]
            record = {
                "id": f"{number}-{place}", "image": f"{number}.png", "rejected": words(kind.answer_words),
                "split": "train" if number < kind.images else "validation",
                "conversations": [{"from": role, "value": text} for role, text in said],
            }  # fmt: skip
            records.append(record)
    (folder / "pairs.json").write_text(json.dumps(records), encoding="utf-8")
    return folder / "pairs.json"
