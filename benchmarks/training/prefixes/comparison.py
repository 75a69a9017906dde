"""Part `shared-prefix`: a step on questions about images, with each image computed once and with each question."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import Clock, Measured, close
from benchmarks.support.workloads import Workload, workload
from benchmarks.training.ready_steps import cached_source
from benchmarks.training.workloads import TOLERANCE
from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.data.sampler import EpochTotals, PackedBatchSampler
from vlmpipe.trainer.dataloading.batches import PackedBatch, collate
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.setup.training import build_training
from vlmpipe.trainer.strategies.base import Strategy

PATCH = 8  # pixels
# Images for training by the tokens of each: so many that sequences of both sides are about as full.
FULL = {16: 28, 64: 20, 256: 10, 576: 5}
QUICK = {16: 6}
SETTINGS = (
    "model.language_model.config.hidden_size=256",
    "model.language_model.config.intermediate_size=704",
    "model.language_model.config.num_key_value_heads=2",
    "model.language_model.config.max_position_embeddings=8192",
    "data.max_images_per_sequence=1024",
    "train.global_batch_size=1",
    "train.micro_batch_size=1",
)
SHARED, ALONE = "each image once", "an image with each question"
NOTE = (
    "Shared prefixes: questions of easy-vqa in its numbers for an image, each a record of its own, about images of "
    "noise with cached features; forward and backward pass of all of them, and an update. The ideal is the ratio of "
    "the tokens, n (P + b) / (P + n b) for n questions of b tokens behind a prefix of P."
)


@dataclass
class Questions:
    """All questions, or pairs, in packed sequences, and a model that trains on them; each call makes an update."""

    strategy: Strategy
    batches: list[PackedBatch]
    totals: EpochTotals
    loss_terms: int  # which the summed loss is divided by
    first_loss: float | None = None

    def __call__(self) -> Measured:
        """Units: questions, or pairs."""
        clock = Clock()
        loss = self.strategy.forward_backward(self.batches, self.loss_terms).item()
        self.strategy.step(1.0)
        self.first_loss = loss if self.first_loss is None else self.first_loss
        return clock.stop(self.totals.samples)


def shared_prefix(bench: Bench) -> None:
    """Equal questions, model, weights and loss on both sides."""
    sizes = QUICK if bench.quick else FULL
    bench.expect(len(sizes))
    for tokens, images in sizes.items():
        side = round(tokens**0.5) * PATCH
        source = write_questions(bench.scratch / f"questions-{tokens}", images, side)
        length = 2048 if tokens < 256 else 4096
        given = (*SETTINGS, f"data.source={source}", f"data.sequence_length={length}", f"model.image_size={side}")
        sides: dict[str, Questions] = {}
        for name, on in ((SHARED, "on"), (ALONE, "off")):  # one by one: runs of a run file have one folder
            settings = (*given, f"data.share_prefix={on}")
            load = workload(bench, "easy-vqa", settings, name=f"{tokens} image tokens, {name}")
            sides[name] = questions(load, bench.worker)
        totals = {name: side.totals for name, side in sides.items()}
        data = f"{tokens} image tokens, {totals[SHARED].samples / images:.1f} questions an image"
        found = bench.take_turns(data, sides)
        losses = [[side.first_loss or 0.0] for side in sides.values()]
        is_same = totals[SHARED].samples == totals[ALONE].samples and close(losses[0], losses[1], TOLERANCE)
        law = f"the same questions, and the same loss before the first update (relative {TOLERANCE:g})"
        bench.report.require(is_same, law, found=str(losses))
        claim = "a question's step: images computed once or with each question"
        bench.report.compare_rates(claim, data, "questions", (SHARED, found[SHARED]), (ALONE, found[ALONE]))
        ideal = totals[ALONE].tokens / totals[SHARED].tokens
        pairs = zip(found[SHARED], found[ALONE], strict=True)
        reached = [other.cpu_per_unit / own.cpu_per_unit for own, other in pairs]
        shares = Side(f"of {ideal:.2f}", [100 * ratio / ideal for ratio in reached])
        bench.report.figure("speed of shared prefixes, of the ideal", data, "%", shares)
    bench.report.note(NOTE)


def questions(load: Workload, worker: ProcessContext) -> Questions:
    """Those of the first epoch."""
    job, split = load.cached, load.split()
    sampler = PackedBatchSampler.of_training(split, job)
    loader, images = PackedLoader(split, sampler, load.chat, load.reader()), cached_source(load)
    rows = [row for step in range(sampler.num_steps(1)) for row in loader.sequences_for_step(step, 0, 1)]
    batches = [collate([row], images) for row in rows]
    totals = sampler.totals(0)
    return Questions(build_training(job, worker).strategy, batches, totals, totals.label_tokens)


def write_questions(folder: Path, images: int, side: int) -> Path:
    """LLaVA records: easy-vqa's questions about its first images, one a record, and one image for validation."""
    import easy_vqa

    asked = sorted(zip(*reversed(easy_vqa.get_train_questions()), strict=True))  # by image, answer and question
    records = []
    folder.mkdir(parents=True)
    by_image = itertools.groupby(asked, key=lambda one: one[0])
    for number, (_, of_image) in enumerate(itertools.islice(by_image, images + 1)):
        noise = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noise).save(buffer, "PNG")
        (folder / f"{number}.png").write_bytes(buffer.getvalue())
        split = "train" if number < images else "validation"
        for place, (_, answer, question) in enumerate(of_image):
            said = [("human", f"<image>\n{question}"), ("gpt", str(answer))]
            turns = [{"from": role, "value": text} for role, text in said]
            record = {"id": f"{number}-{place}", "split": split, "image": f"{number}.png", "conversations": turns}
            records.append(record)
    (folder / "questions.json").write_text(json.dumps(records), encoding="utf-8")
    return folder / "questions.json"
