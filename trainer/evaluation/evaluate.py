"""The evaluation job: loss, and exact match by generation per slice, with controls such as shuffled images.

Every held-out question is asked alone, with its sample's images. As a control, the same questions are asked with
another sample's images (`shuffled_image`) and with features of zero (`no_image`): answers that are still right come
from the text alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index, SplitIndex
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.dataloading.batches import cached_images, collate, online_images
from vlmpipe.trainer.dataloading.readers import open_readers
from vlmpipe.trainer.distributed.process import PATIENCE, ProcessContext, run_worker, start_worker
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.evaluation.answer import AnsweringModel, Asked, ShownImages, answer_questions
from vlmpipe.trainer.evaluation.benchmarks.run import open_benchmarks, run_benchmarks
from vlmpipe.trainer.evaluation.confusion_matrix import confusions
from vlmpipe.trainer.evaluation.metrics import (
    Prediction,
    Question,
    baseline_answers,
    chance,
    exact_match,
    is_right,
    scores,
)
from vlmpipe.trainer.evaluation.paired import paired_counts
from vlmpipe.trainer.evaluation.reference_log_probs import preference_scores, references_of_run, simpo_scores
from vlmpipe.trainer.evaluation.relevance import (
    RELEVANCE_MAPS,
    relevance_records,
    selecting,
    selection_controls,
    summarised,
)
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.models.image_tokens import ImageForm, image_form_of
from vlmpipe.trainer.models.layers.preference import answer_tokens
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.serving.exported_model import load_export
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import seal_lines, write_record

LOSS_ROWS_PER_RANK = 1  # the memory of the machine is not known, nor how long a packed sequence is


@dataclass(frozen=True)
class Subject:
    """The exported model and the held-out data."""

    model: AnsweringModel
    prepared: Storage
    split: SplitIndex
    shards: ShardReader

    def images(self, sample: int) -> ShownImages:
        """Those of a held-out sample."""
        return ShownImages(
            self.split.image_token_counts(sample),
            self.split.image_sizes(sample),
            self.split.image_sha256(sample),
            lambda: self.shards.images(self.split.sample_location(sample)),
            are_cached=True,
        )


def evaluate(job: JobConfig, worker: ProcessContext) -> None:
    """Evaluate `<run>/export/` on the held-out split; write evaluate.json and predictions.jsonl. Collective."""
    started = time.perf_counter()
    progress = Progress(job.run.run_uri, "evaluate") if worker.is_first else None
    subject = load_subject(job, worker)
    questions = held_out_questions(subject, job.evaluate.max_samples)
    mine = questions[worker.rank :: worker.world_size]
    controls = [*job.evaluate.controls, *selection_controls(job.model.relevance)]
    rounds = ["", *controls]
    answered: dict[str, list[Prediction]] = {}
    benchmarks = open_benchmarks(job)
    for control in rounds:
        answered[control] = []
        for start in range(0, len(mine), job.evaluate.batch_questions):
            batch = mine[start : start + job.evaluate.batch_questions]
            answered[control] += answer(job, subject, batch, control, worker)
            if progress:
                asked = sum(len(predictions) for predictions in answered.values())
                progress.update(asked, len(mine) * len(rounds), unit="questions", message=control)
    relevant = relevance_of_questions(job, subject, mine, worker) if job.model.relevance else []
    benchmarked = run_benchmarks(job, subject.model, benchmarks, worker, progress)
    everyone: list[Any] = [None] * worker.world_size
    dist.all_gather_object(everyone, answered)
    all_relevant: list[Any] = [None] * worker.world_size
    dist.all_gather_object(all_relevant, relevant)
    predictions = {
        control: sorted((p for part in everyone for p in part[control]), key=lambda p: (p.id, p.turn))
        for control in rounds
    }
    store = open_storage(job.run.run_uri)
    if progress:  # before what may run out of memory
        store.write("predictions.jsonl", seal_lines(map(asdict, predictions[""])))
    loss, preferences = validation_loss(job, subject, worker)
    if not progress:
        return
    stats = json.loads(subject.prepared.read("stats.json"))
    by_chance = chance(questions, stats["slices"])
    pictures = {(q.id, q.turn): (*subject.split.image_sha256(q.sample), q.question) for q in questions}
    scored_by_slice = scores(predictions[""], pictures, job.evaluate.cider_d)
    for name, scored in scored_by_slice["slices"].items():
        scored["chance"] = by_chance["slices"][name]["exact_match"]
    if job.model.relevance:
        found = [one for part in all_relevant for one in part]
        scored_by_slice["relevance"] = summarised([one for _, one in found], scored_by_slice["exact_match"])
    result = {
        "samples": len({question.sample for question in questions}),
        **scored_by_slice,
        "chance": by_chance["exact_match"],
        "paired": paired_answers(subject, questions, predictions, stats["slices"]),
        "loss": loss,
        "perplexity": math.exp(min(loss, 100.0)),
        **preferences,
        "confusion": confusions(predictions[""]),
        **({"benchmarks": benchmarked} if benchmarked else {}),
        "controls": {control: exact_match(predictions[control]) for control in controls},
        "images": stats["splits"]["eval"]["unique_images"],
        "images_also_in_train": stats["eval_images_also_in_train"],
        "held_out_sha256": hashlib.sha256(
            repr([(q.id, q.turn, q.question, q.answer) for q in questions]).encode()
        ).hexdigest(),
        "wall_s": time.perf_counter() - started,
    }
    if job.model.relevance:
        write_record(
            store,
            RELEVANCE_MAPS,
            {"maps": [dict(zip(("id", "turn"), key, strict=True)) | one for key, one in found if one["relevance"]]},
        )
    write_record(store, "evaluate.json", result)
    progress.finish(message=f"exact match {result['exact_match']:.3f} on {result['questions']} held-out questions")


def paired_answers(
    subject: Subject,
    questions: Sequence[Question],
    predictions: Mapping[str, Sequence[Prediction]],
    slices: Mapping[str, Any],
) -> dict[str, Any]:
    """The model's answers beside the majority baseline's and those of each control, to the same questions."""
    images = {question.id: tuple(subject.split.image_sha256(question.sample)) or question.id for question in questions}
    right = {(one.id, one.turn): one.correct for one in predictions[""]}
    others = {control: {(one.id, one.turn): one.correct for one in predictions[control]} for control in predictions}
    ordered = sorted(questions, key=lambda q: (q.id, q.turn))
    baseline = baseline_answers(ordered, slices)
    others["chance"] = {(q.id, q.turn): correct for q, correct in zip(ordered, baseline, strict=True)}
    return {
        name: paired_counts(
            [images[identity] for identity, _ in answers], [right[key] for key in answers], list(answers.values())
        ).model_dump()
        for name, answers in others.items()
        if name
    }


def load_subject(job: JobConfig, worker: ProcessContext) -> Subject:
    """The exported model on this rank's device, and the held-out split.

    Raises DataError for an empty split or a damaged file.
    """
    pointers = job.pointers()
    prepared = open_prepared(pointers.prepared_uri)
    split = Index.load(pointers.prepared_uri).split("eval")
    if not len(split):
        raise DataError(
            "the held-out split has no samples",
            expected="at least one sample to evaluate on",
            fix="raise data.validation_fraction",
        )
    family, model = load_export(job, worker.device)
    readers = open_readers(job)
    return Subject(
        model=AnsweringModel(family, model, Chat.load(prepared, image_form_of(job.model)), readers.features),
        prepared=prepared,
        split=split,
        shards=readers.samples,
    )


def held_out_questions(subject: Subject, max_samples: int) -> list[Question]:
    """Every turn of the held-out samples, or of `max_samples` evenly spaced ones, as a question.

    But for those that `asked_turns` leaves out.
    """
    count = len(subject.split)
    chosen = min(count, max_samples or count)
    questions = []
    for sample in (number * count // chosen for number in range(chosen)):
        turns = subject.shards.turns(subject.split.sample_location(sample))
        identity, system = subject.split.ids[sample], turns[0].system
        questions += [
            Question(sample, identity, number, turn.slice, turn.question, turn.answer, system)
            for number, turn in asked_turns(turns)
        ]
    return questions


def asked_turns(turns: Sequence[Turn]) -> list[tuple[int, Turn]]:
    """The turns of a sample that can be asked, with their numbers.

    None of a sample with images in answers, as the model answers in text, and none whose answer was no label, which may
    be wrong.
    """
    if any(IMAGE_TOKEN in turn.answer for turn in turns):
        return []
    return [(number, turn) for number, turn in enumerate(turns) if not turn.is_context]


def answer(
    job: JobConfig, subject: Subject, questions: Sequence[Question], control: str, worker: ProcessContext
) -> list[Prediction]:
    """The model's answers to questions, with the images of a control ("": the question's own)."""
    form, asked = subject.model.chat.form, []
    for question in questions:
        other = other_sample(subject.split, question.sample, form) if control == "shuffled_image" else None
        own = subject.images(question.sample)
        shown = own if other is None else subject.images(other)
        asked.append(Asked(Turn(question.question, "", system=question.system), own, shown))
    most, is_blank = job.evaluate.max_new_tokens, control == "no_image"
    with selecting(subject.model.model, control):
        answers = answer_questions(job, subject.model, asked, worker.device, max_new_tokens=most, is_blank=is_blank)
    return [
        Prediction(
            q.id, q.turn, q.slice, q.question, q.answer, one.text, is_right(q.answer, one.text), one.finish_reason
        )
        for q, one in zip(questions, answers, strict=True)
    ]


def relevance_of_questions(
    job: JobConfig, subject: Subject, questions: Sequence[Question], worker: ProcessContext
) -> list[tuple[tuple[str, int], dict[str, Any]]]:
    """What is kept for each question, by its id and turn."""
    found: list[dict[str, Any]] = []
    for start in range(0, len(questions), job.evaluate.batch_questions):
        batch = questions[start : start + job.evaluate.batch_questions]
        turns = [subject.shards.turns(subject.split.sample_location(asked.sample))[asked.turn] for asked in batch]
        images = [subject.images(asked.sample) for asked in batch]
        found += relevance_records(job, subject.model, turns, images, worker.device)
    return [((asked.id, asked.turn), one) for asked, one in zip(questions, found, strict=True)]


def validation_loss(job: JobConfig, subject: Subject, worker: ProcessContext) -> tuple[float, dict[str, float]]:
    """Mean loss over all label tokens of the packed held-out split, of pairs those of chosen answers; and what pairs
    say (`preference_scores`). Collective."""
    in_pairs = job.train.in_pairs
    sequence = PackedBatchSampler(
        subject.split,
        job.data,
        seed=0,
        global_batch_size=LOSS_ROWS_PER_RANK * worker.world_size,
        tile_tokens=subject.model.chat.form.tile_tokens,
        in_pairs=in_pairs,
        most_kept=subject.model.chat.form.most_kept,
    )
    model, features = subject.model, subject.model.features
    cached = features is not None
    source = cached_images(features, job.model) if features else online_images(image_preparer(job.model))
    module = model.family.training_module(job.model, model.model, cached=cached).eval()
    Recompute(loss_chunk_tokens=job.train.loss_chunk_tokens).apply(model.family, module)
    total = torch.zeros(2, dtype=torch.float64, device=worker.device)
    loader = PackedLoader(subject.split, sequence, model.chat, subject.shards, images=not cached)
    pairs: dict[str, list[float]] = {}
    with torch.inference_mode():
        for step in range(sequence.num_steps(1)):
            rows = loader.sequences_for_step(step, worker.rank, worker.world_size)
            batch = collate(rows, source)
            found = module(**batch.to(worker.device))
            if batch.pairs is None:
                total += torch.stack([found.double(), found.new_tensor(len(batch.label_ids)).double()])
                continue
            log_probs, tokens = found.view(-1, 2).double(), answer_tokens(batch.pairs).view(-1, 2)
            total[0] -= log_probs[:, 0].sum()
            total[1] += int(tokens[:, 0].sum())
            ids = [identity for row in rows for identity in row.sample_ids]
            pairs |= dict(zip(ids, torch.cat([log_probs.cpu(), tokens], dim=1).tolist(), strict=True))
    dist.all_reduce(total)
    loss = float(total[0] / total[1])
    if not in_pairs:
        return loss, {}
    everyone: list[dict[str, list[float]]] = [{}] * worker.world_size
    dist.all_gather_object(everyone, pairs)
    of_all = {identity: values for part in everyone for identity, values in part.items()}
    ordered = torch.tensor([of_all[identity] for identity in subject.split.ids])
    log_probs, tokens = ordered[:, :2], ordered[:, 2:]
    if job.train.objective == "simpo":
        return loss, simpo_scores(log_probs, tokens, job.train.simpo_beta, job.train.simpo_gamma)
    references = None if job.train.trainer else torch.from_numpy(references_of_run(job.run.run_uri, "eval"))
    return loss, preference_scores(log_probs, references, job.train.dpo_beta)


def other_sample(split: SplitIndex, sample: int, form: ImageForm) -> int:
    """A distant sample whose images have the same tokens (and tiles in each direction), so that only the image changes.

    Distant, because samples with neighbouring ids are often related, such as one scan at two places.
    """
    counts, own = split.image_token_counts(sample), set(split.image_sha256(sample))
    marks = form.marks(split.image_sizes(sample))
    for step in range(len(split)):
        other = (sample + len(split) // 2 + step) % len(split)
        if split.image_token_counts(other) != counts or not own.isdisjoint(split.image_sha256(other)):
            continue
        if form.marks(split.image_sizes(other)) == marks:
            return other
    return sample


def main(arguments: list[str] | None = None) -> None:
    """Evaluate on this rank."""
    parser = argparse.ArgumentParser(prog="vlmpipe.trainer.evaluation.evaluate", description=__doc__)
    parser.add_argument("--config", required=True, help="URI of the run's run.json")
    options = parser.parse_args(arguments)
    evaluate(JobConfig.load(options.config), start_worker(PATIENCE, shares_gpus=True))


if __name__ == "__main__":
    run_worker(main)
