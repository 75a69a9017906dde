"""The evaluation job: loss, and exact match by generation per slice, with controls such as shuffled images.

Every validation question is asked with its sample's images, a later turn after the earlier ones. As a control, the same
questions are asked with another sample's images (`shuffled_image`) and with features of zero (`no_image`): answers that
are still right come from the text alone.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from vlmpipe.trainer.gc_control import collector_off

with collector_off():
    import torch
    import torch.distributed as dist

    from vlmpipe.trainer.config.job import JobConfig
    from vlmpipe.trainer.data.chat.encode import Chat
    from vlmpipe.trainer.data.loader import PackedLoader
    from vlmpipe.trainer.data.sampler import PackedBatchSampler
    from vlmpipe.trainer.data.shards.index import Index, SplitIndex
    from vlmpipe.trainer.data.shards.prepared_files import open_prepared
    from vlmpipe.trainer.dataloading.batches import cached_images, collate, online_images
    from vlmpipe.trainer.dataloading.readers import open_readers
    from vlmpipe.trainer.distributed.process import PATIENCE, ProcessContext, run_worker, start_worker
    from vlmpipe.trainer.errors import DataError
    from vlmpipe.trainer.evaluation.answer import AnsweringModel
    from vlmpipe.trainer.evaluation.baseline.score import Asking, StartWeights
    from vlmpipe.trainer.evaluation.batch_budget import BatchBudget
    from vlmpipe.trainer.evaluation.benchmarks.like_train import validation_images_like_train
    from vlmpipe.trainer.evaluation.benchmarks.run import open_benchmarks, run_benchmarks
    from vlmpipe.trainer.evaluation.confusion_matrix import confusions
    from vlmpipe.trainer.evaluation.examiner import Examiner, examiner_of
    from vlmpipe.trainer.evaluation.metrics import Prediction, Question, majority_baseline, scores
    from vlmpipe.trainer.evaluation.quantized.scores import QuantizedExports, require_quantizing
    from vlmpipe.trainer.evaluation.validation.champion import rescore
    from vlmpipe.trainer.evaluation.validation.champion_pointer import champion_of
    from vlmpipe.trainer.evaluation.validation.field_slices import field_slices
    from vlmpipe.trainer.evaluation.validation.questions import ValidationSplit, answer, shares_of, with_images
    from vlmpipe.trainer.evaluation.validation.result import (
        Pairs,
        champion_scores,
        control_scores,
        cut_answers,
        paired_answers,
    )
    from vlmpipe.trainer.evaluation.validation.shuffled_images import ShuffledImages
    from vlmpipe.trainer.evaluation.validation_loss import as_in_training
    from vlmpipe.trainer.hooks.features import features_of
    from vlmpipe.trainer.models.image_processor import image_preparer
    from vlmpipe.trainer.models.image_threads import use_threads
    from vlmpipe.trainer.models.image_tokens import image_form_of
    from vlmpipe.trainer.models.layers.recompute_policy import Recompute
    from vlmpipe.trainer.models.loss.pairs import answer_tokens
    from vlmpipe.trainer.progress import Progress
    from vlmpipe.trainer.records.evaluation import Evaluation
    from vlmpipe.trainer.records.evaluation_notes import cut_sentence
    from vlmpipe.trainer.serving.exported_model import load_export
    from vlmpipe.trainer.storage import open_storage
    from vlmpipe.trainer.storage.base import Storage
    from vlmpipe.trainer.storage.export_manifest import require_whole_export
    from vlmpipe.trainer.storage.records import seal_lines, write_record

LOSS_ROWS_PER_RANK = 1  # the memory of the machine is not known, nor how long a packed sequence is


@dataclass(frozen=True)
class Subject:
    """The exported model and the validation data."""

    model: AnsweringModel
    prepared: Storage
    validation: ValidationSplit

    @property
    def split(self) -> SplitIndex:
        return self.validation.split


def evaluate(job: JobConfig, worker: ProcessContext) -> None:
    """Evaluate `<run>/export/` on the validation split; write evaluate.json and predictions.jsonl. Collective."""
    require_quantizing(job)
    started = time.perf_counter()
    progress = Progress(job.run.run_uri, "evaluate") if worker.is_first else None
    store = open_storage(job.run.run_uri)
    champion = champion_of(store)
    subject = load_subject(job, worker)
    validation, split, stats = subject.validation, subject.split, json.loads(subject.prepared.read("stats.json"))
    questions = validation.questions(job.evaluate.max_samples, job.evaluate.earlier_turns)
    of_this_rank = shares_of(questions, worker.world_size, job.evaluate.batch_questions)[worker.rank]
    controls: list[str] = [*job.evaluate.controls]
    for feature in features_of(job):
        controls += feature.controls(job.model)
    examiner = examiner_of(job)
    shuffled = ShuffledImages(split, validation.shards, subject.model.chat.form)
    benchmarks = open_benchmarks(job)
    start_weights = StartWeights.of(job, validation, questions, benchmarks)
    answered, resized = dict[str, list[Prediction]](), 0
    for control in ["", *controls]:
        answered[control] = []
        for start in range(0, len(of_this_rank), job.evaluate.batch_questions):
            batch = of_this_rank[start : start + job.evaluate.batch_questions]
            asked = with_images(validation, batch, shuffled if control == "shuffled_image" else None)
            answered[control] += answer(job, subject.model, asked, worker.device, control=control)
            resized += sum(not question.shown.are_cached for _, question in asked)
            if progress:
                done = sum(len(predictions) for predictions in answered.values())
                rounds = 1 + len(controls) + (champion is not None)
                progress.update(done, len(of_this_rank) * rounds, unit="questions", message=control)
    examined = records_of_questions(job, subject, examiner, of_this_rank, worker) if examiner else []
    benchmarked = run_benchmarks(job, subject.model, benchmarks, worker, progress)
    start_weights, probed = start_weights.probing(subject.model, benchmarked.answers, worker)
    budget = subject.model.budget
    of_rank = (answered, examined, resized, budget.out_of_memory, budget.tokens)
    everyone = [of_rank] * worker.world_size
    dist.all_gather_object(everyone, of_rank)
    predictions = {
        control: sorted((p for part, *_ in everyone for p in part[control]), key=lambda p: (p.id, p.turn))
        for control in answered
    }
    if progress:  # before what may run out of memory
        store.write("predictions.jsonl", seal_lines(prediction.line() for prediction in predictions[""]))
    loss = validation_loss(job, subject, worker)
    chat, features = subject.model.chat, subject.model.features
    del subject  # its model, before another one is loaded; transformers' own are part of reference cycles
    gc.collect()
    if worker.device.type == "cuda":
        torch.cuda.empty_cache()
    rescored = rescore(job, champion, validation, of_this_rank, budget, worker) if champion else None
    asking = Asking(chat, features, budget)
    quantized = QuantizedExports(job, validation, of_this_rank, asking).scores(predictions[""], worker, progress)
    started_from = start_weights.scores(asking, predictions[""], probed, worker, progress)
    if not progress:
        return
    validated = _as_in_training(job, store, loss)
    majority = majority_baseline(questions, stats["slices"])
    images = {(q.id, q.turn): (*split.image_sha256(q.sample), q.question) for q in questions}
    scored_by_slice = scores(predictions[""], images, job.evaluate.cider_d)
    for name, scored in scored_by_slice["slices"].items():
        scored["chance"] = majority["slices"][name]["exact_match"]
    records = [record for _, part, *_ in everyone for record in part]
    measures: dict[str, object] = {}
    if examiner:
        measures[examiner.measures] = examiner.summarise(
            [record for _, record in records], scored_by_slice["exact_match"]
        )
    pairs = Pairs(predictions[""])
    resized, out_of_memory = sum(part[2] for part in everyone), sum(part[3] for part in everyone)
    result = {
        "samples": len({question.sample for question in questions}),
        **scored_by_slice,
        **measures,
        "chance": majority["exact_match"],
        "paired": paired_answers(
            pairs, questions, {control: predictions[control] for control in controls}, stats["slices"]
        ),
        **({"champion": champion_scores(rescored, pairs)} if rescored else {}),
        **({"start": started_from} if started_from else {}),
        **({"quantized": quantized} if quantized else {}),
        "loss": loss.mean,
        "perplexity": math.exp(min(loss.mean, 100.0)),
        **loss.preferences,
        **({"validated": validated} if validated else {}),
        **cut_answers(predictions[""], questions, chat, job.evaluate.max_new_tokens),
        "earlier_turns": job.evaluate.earlier_turns,
        "questions_after_turns": sum(bool(question.earlier) for question in questions),
        "out_of_memory": out_of_memory,
        "batch_tokens": min(part[4] for part in everyone),
        "confusion": confusions(predictions[""]),
        **({"by_field": field_slices(job.data.slices, predictions[""])} if job.data.slices else {}),
        **({"benchmarks": benchmarked.results} if benchmarked.results else {}),
        "controls": {
            control: control_scores(predictions[control], len(questions), resized if control == "shuffled_image" else 0)
            for control in controls
        },
        "images": stats["splits"]["eval"]["unique_images"],
        "images_also_in_train": stats["eval_images_also_in_train"],
        **validation_images_like_train(stats),
        "held_out_sha256": hashlib.sha256(
            repr([(q.id, q.turn, q.question, q.answer) for q in questions]).encode()
        ).hexdigest(),
        "wall_s": time.perf_counter() - started,
    }
    if examiner:
        maps = [
            dict(zip(("id", "turn"), key, strict=True)) | record for key, record in records if examiner.has_map(record)
        ]
        write_record(store, examiner.maps_file, {"maps": maps})
    evaluation = Evaluation.model_validate(result)
    evaluation.write(store)
    message = f"exact match {evaluation.exact_match:.3f} on {evaluation.questions} validation questions"
    notes = [evaluation.start.sentence() if evaluation.start else "", cut_sentence(evaluation)]
    progress.finish(message="; ".join([message, *filter(None, notes)]))


def load_subject(job: JobConfig, worker: ProcessContext) -> Subject:
    """The exported model on this rank's device, and the validation split.

    Raises DataError for an empty split or a damaged file.
    """
    pointers = job.pointers()
    prepared = open_prepared(pointers.prepared_uri)
    split = Index.load(pointers.prepared_uri).split("eval")
    if not len(split):
        raise DataError(
            "the validation split has no samples",
            expected="at least one sample to evaluate on",
            fix="raise data.validation_fraction",
        )
    family, model = load_export(job, worker.device)
    readers, chat = open_readers(job), Chat.load(prepared, image_form_of(job.model), is_proved=True)
    readers.require_room(split)
    budget = BatchBudget(job.evaluate.batch_tokens)
    return Subject(
        AnsweringModel(family, model, chat, readers.features, budget), prepared, ValidationSplit(split, readers.samples)
    )


def records_of_questions(
    job: JobConfig, subject: Subject, examiner: Examiner, questions: Sequence[Question], worker: ProcessContext
) -> list[tuple[tuple[str, int], dict[str, object]]]:
    """The examiner's record of each question, by its id and turn."""
    records: list[dict[str, object]] = []
    for start in range(0, len(questions), job.evaluate.batch_questions):
        batch = questions[start : start + job.evaluate.batch_questions]
        turns = [
            subject.validation.shards.turns(subject.split.sample_location(asked.sample))[asked.turn] for asked in batch
        ]
        images = [subject.validation.images(asked.sample) for asked in batch]
        records += examiner.records(job, subject.model, turns, images, worker.device)
    return [((asked.id, asked.turn), record) for asked, record in zip(questions, records, strict=True)]


@dataclass(frozen=True)
class ValidationLoss:
    """Mean loss over all label tokens of the packed validation split, of pairs those of chosen answers; what pairs say
    (`preference_scores`); and the loss over the sequences that training validates on, with their label tokens."""

    mean: float
    preferences: dict[str, float]
    of_first: float = 0.0
    of_first_label_tokens: int = 0


def _as_in_training(job: JobConfig, run: Storage, loss: ValidationLoss) -> dict[str, float]:
    """See `as_in_training`; says where there is nothing to compare."""
    described = require_whole_export(run)
    compared = as_in_training(
        job,
        described["step"],
        averaged=described["averaged"],
        loss=loss.of_first,
        label_tokens=loss.of_first_label_tokens,
    )
    if not compared:
        print("evaluate: training took no validation loss of these weights, as it does after its last step, with which "
              "that of the export would be compared", flush=True)  # fmt: skip
    return compared


def validation_loss(job: JobConfig, subject: Subject, worker: ProcessContext) -> ValidationLoss:
    """Collective."""
    in_pairs = job.train.in_pairs
    sequence = PackedBatchSampler(
        subject.split,
        job.data,
        seed=0,
        global_batch_size=LOSS_ROWS_PER_RANK * worker.world_size,
        in_pairs=in_pairs,
        max_kept=subject.model.chat.form.max_kept,
    )
    model, features = subject.model, subject.model.features
    cached = features is not None
    source = cached_images(features, job.model) if features else online_images(image_preparer(job.model))
    module = model.family.training_module(job.model, model.model, cached=cached).eval()
    Recompute(loss_chunk_tokens=job.train.loss_chunk_tokens).apply(model.family, module)
    # Loss and label tokens, of all sequences and of the first ones.
    total = torch.zeros(2, 2, dtype=torch.float64, device=worker.device)
    loader = PackedLoader(subject.split, sequence, model.chat, subject.validation.shards, images=not cached)
    pairs: dict[str, list[float]] = {}
    with torch.inference_mode():
        for step in range(sequence.num_steps(1)):
            rows = loader.sequences_for_step(step, worker.rank, worker.world_size)
            batch = collate(rows, source)
            result = module(**batch.to(worker.device))
            if batch.pairs is None:
                summed = torch.stack([result.double(), result.new_tensor(len(batch.label_ids)).double()])
                is_first = step * worker.world_size + worker.rank < job.train.validated_sequences
                total += torch.stack([summed, summed * is_first])
                continue
            log_probs, tokens = result.view(-1, 2).double(), answer_tokens(batch.pairs).view(-1, 2)
            total[0, 0] -= log_probs[:, 0].sum()
            total[0, 1] += int(tokens[:, 0].sum())
            ids = [identity for row in rows for identity in row.sample_ids]
            pairs |= dict(zip(ids, torch.cat([log_probs.cpu(), tokens], dim=1).tolist(), strict=True))
    dist.all_reduce(total)
    loss = float(total[0, 0] / total[0, 1])
    if not in_pairs:
        return ValidationLoss(loss, {}, float(total[1, 0] / total[1, 1]), int(total[1, 1]))
    everyone: list[dict[str, list[float]]] = [{}] * worker.world_size
    dist.all_gather_object(everyone, pairs)
    of_all = {identity: values for part in everyone for identity, values in part.items()}
    ordered = torch.tensor([of_all[identity] for identity in subject.split.ids])
    log_probs, tokens = ordered[:, :2], ordered[:, 2:]
    scores: dict[str, float] = {}
    for feature in features_of(job):
        scores |= feature.pair_scores(job, log_probs, tokens)
    return ValidationLoss(loss, scores)


def main(arguments: list[str] | None = None) -> None:
    """Evaluate on this rank."""
    parser = argparse.ArgumentParser(prog="vlmpipe.trainer.evaluation.evaluate", description=__doc__)
    parser.add_argument("--config", required=True, help="URI of the run's run.json")
    options = parser.parse_args(arguments)
    job = JobConfig.load(options.config)
    use_threads(job.data.loader_threads)
    evaluate(job, start_worker(PATIENCE, shares_gpus=True))


if __name__ == "__main__":
    run_worker(main)
