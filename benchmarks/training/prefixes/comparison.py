"""Part `shared-prefix`: a step on questions about images, with each image computed once and with each question, and
nanoVLM's step on the same questions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import Clock, Measured, close
from benchmarks.support.workloads import Workload, workload
from benchmarks.training.nanovlm import (
    PATCH,
    Size,
    is_there,
    nano_inputs,
    nano_model,
    nano_modules,
    nano_optimizer,
    overrides,
)
from benchmarks.training.prefixes.packed_steps import PackedSteps
from benchmarks.training.prefixes.questions import write_questions
from benchmarks.training.prefixes.scenes import write_scenes
from benchmarks.training.ready_steps import cached_source, padded
from benchmarks.training.step_split import one_thread
from benchmarks.training.workloads import TOLERANCE
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.dataloading.batches import collate, online_images
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.setup.training import build_training

# Images for training by the tokens of each: so many that sequences of both sides are about as full, since padding is
# computed: 84 to 100 % of each.
FULL = {16: 38, 64: 20, 256: 10, 576: 5}
QUICK = {16: 6}
SCENES, SCENE_TOKENS = 16, 64
NANO_ROWS = 16  # questions of a batch of nanoVLM's, of which an update has several
SETTINGS = (
    "data.max_images_per_sequence=1024",
    "data.turns=independent",
    "train.global_batch_size=1",
    "train.micro_batch_size=1",
    "train.optimizer.weight_decay=0",
)
SHARED, ALONE = "each image once", "an image with each question"
ONLINE, NANO = "each image once, tower in the step", "nanoVLM"
NOTE = (
    "Shared prefixes: questions of easy-vqa in its numbers for an image, each a record of its own, about images of "
    "noise, and drawn scenes with GQA's numbers; forward and backward pass of all of them, and an update. Features are "
    "cached where nothing else is said. The ideal is the ratio of the tokens, n (P + b) / (P + n b) for n questions of "
    "b tokens behind a prefix of P."
)
NANO_NOTE = (
    f"nanoVLM: its model from our weights, {NANO_ROWS} questions a batch, padded to the longest, one update of all; "
    "its frozen tower is in its step, as it has no cache. Both sides multiply by the same library, one thread."
)


class NanoQuestions:
    """The same questions by nanoVLM, one a row; each call makes an update."""

    def __init__(self, load: Workload, size: Size) -> None:
        job, split = load.online, load.split()
        with nano_modules() as modules:
            self._model = nano_model(modules, job.model, size, load.chat.tokenizer)
        self._optimizer, self._parameters = nano_optimizer(self._model, job.train.optimizer)
        self._clip = job.train.clip_grad_norm
        self.first_loss: float | None = None
        sampler = PackedBatchSampler.of_training(split, job)
        loader = PackedLoader(split, sampler, load.chat, load.reader(), images=True)
        order = [number for row in sampler.first_sequences(sampler.num_sequences(0)) for number in row]
        rows = [order[start : start + NANO_ROWS] for start in range(0, len(order), NANO_ROWS)]
        images = online_images(image_preparer(job.model))
        made = [padded([loader.pack_sequence([number]) for number in numbers], images) for numbers in rows]
        self.questions, labels = len(order), sum(len(batch.label_ids) for batch in made)
        self._batches = [(nano_inputs([batch]), len(batch.label_ids) / labels) for batch in made]

    def __call__(self) -> Measured:
        """Units: questions."""
        clock, total = Clock(), 0.0
        for inputs, share in self._batches:
            loss: Tensor = self._model(**inputs)[1] * share
            loss.backward()
            total += loss.item()
        clip_grad_norm_(self._parameters, max_norm=self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.first_loss = total if self.first_loss is None else self.first_loss
        return clock.stop(self.questions)


def shared_prefix(bench: Bench) -> None:
    """Equal questions, model, weights and loss on all sides."""
    sizes = QUICK if bench.quick else FULL
    sets: dict[str, tuple[int, Callable[[Path], Path], int]] = {}
    for tokens, images in sizes.items():
        side = round(tokens**0.5) * PATCH
        sets[f"{tokens} image tokens"] = (tokens, partial(write_questions, images=images, side=side), images)
        if tokens == SCENE_TOKENS:
            scenes = partial(write_scenes, train=SCENES, validation=1)
            sets[f"{tokens} image tokens, GQA's numbers"] = (tokens, scenes, SCENES)
    bench.expect(len(sets))
    with one_thread():
        for number, (name, (tokens, write, images)) in enumerate(sets.items()):
            compare(bench, name, tokens, write(bench.scratch / f"questions-{number}"), images)
    bench.report.note(NOTE)
    if is_there():
        bench.report.note(NANO_NOTE)
    else:
        bench.report.note("nanoVLM is missing: there is no checkout in build/nanovlm (`--only nanovlm` says how).")


def compare(bench: Bench, name: str, tokens: int, source: Path, images: int) -> None:
    size = Size(256, 704, 4, 4, 2, 192, 2, 4, batch=1, side=round(tokens**0.5) * PATCH, scale=1)
    settings = (
        *(one for one in overrides(size, quick=False) if one.startswith("model=")),
        *SETTINGS,
        f"data.source={source}",
        f"data.sequence_length={2048 if tokens < 256 else 4096}",
    )
    sides: dict[str, PackedSteps | NanoQuestions] = {}
    stored: dict[str, int] = {}
    for side, on in ((SHARED, "on"), (ALONE, "off")):  # one by one: runs of a run file have one folder
        load = workload(bench, "easy-vqa", (*settings, f"data.share_prefix={on}"), name=f"{name}, {side}")
        sides[side] = questions(load, load.cached, bench.worker)
        if side == SHARED:
            sides[ONLINE] = questions(load, load.online, bench.worker)
        elif is_there():
            sides[NANO] = NanoQuestions(load, size)
        folder = Path(load.online.pointers().prepared_uri, "shards")
        stored[side] = sum(path.stat().st_size for path in folder.glob("train-*.tar"))
    totals = {side: found.totals for side, found in sides.items() if isinstance(found, PackedSteps)}
    data = f"{name}, {totals[SHARED].samples / images:.1f} questions an image"
    found = bench.take_turns(data, dict(sides))
    losses = [[side.first_loss or 0.0] for side in sides.values()]
    is_same = totals[SHARED].samples == totals[ALONE].samples
    is_same = is_same and all(close(losses[0], other, TOLERANCE) for other in losses)
    law = f"the same questions, and the same loss before the first update (relative {TOLERANCE:g})"
    bench.report.require(is_same, law, found=str(losses))
    claim = "a question's step: images computed once or with each question"
    pairs = [(claim, SHARED, ALONE)]
    if NANO in sides:
        claim = "a question's step: ours or nanoVLM"
        pairs += [(claim, ONLINE, NANO), (claim, SHARED, NANO), (claim, ALONE, NANO)]
    for claim, ours, other in pairs:
        bench.report.compare_rates(claim, data, "questions", (ours, found[ours]), (other, found[other]))
    ideal = totals[ALONE].tokens / totals[SHARED].tokens
    rounds = zip(found[SHARED], found[ALONE], strict=True)
    reached = [other.cpu_per_unit / own.cpu_per_unit for own, other in rounds]
    shares = Side(f"of {ideal:.2f}", [100 * ratio / ideal for ratio in reached])
    bench.report.figure("speed of shared prefixes, of the ideal", data, "%", shares)
    of_question = {side: bytes_ / totals[SHARED].samples for side, bytes_ in stored.items()}
    label = f"{ALONE} {of_question[ALONE]:,.0f}, {SHARED}"
    bench.report.figure("shards of prepared data", data, "bytes a question", Side(label, [of_question[SHARED]]))


def questions(load: Workload, job: JobConfig, worker: ProcessContext) -> PackedSteps:
    """Those of the first epoch."""
    split, is_cached = load.split(), job is load.cached
    sampler = PackedBatchSampler.of_training(split, job)
    images = cached_source(load) if is_cached else online_images(image_preparer(job.model))
    loader = PackedLoader(split, sampler, load.chat, load.reader(), images=not is_cached)
    rows = [row for step in range(sampler.num_steps(1)) for row in loader.sequences_for_step(step, 0, 1)]
    with torch.no_grad():
        batches = [collate([row], images) for row in rows]
    totals = sampler.totals(0)
    return PackedSteps(build_training(job, worker).strategy, batches, totals, totals.label_tokens)
