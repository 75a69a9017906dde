"""The `replay` job: the start model answers the questions that choose-replay wrote, once for all runs that ask them.

Ranks take every n-th part of the questions. A part that has its counts is done, so that a restarted job answers only
what is missing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.trainer.gc_control import collector_off

with collector_off():
    import pyarrow as pa
    import pyarrow.parquet as pq

    from vlmpipe.trainer.config.data import REPLAY_SAMPLES
    from vlmpipe.trainer.config.job import JobConfig
    from vlmpipe.trainer.distributed.agreement import agree, meet, on_first
    from vlmpipe.trainer.distributed.process import PATIENCE, ProcessContext, run_worker, start_worker
    from vlmpipe.trainer.errors import DataError
    from vlmpipe.trainer.evaluation.answer import AnsweringModel, answer_questions, ask_about
    from vlmpipe.trainer.evaluation.replay.questions import QUESTIONS, part_name
    from vlmpipe.trainer.evaluation.replay.start_model import answering_start
    from vlmpipe.trainer.models.image_threads import use_threads
    from vlmpipe.trainer.progress import Progress
    from vlmpipe.trainer.records.replay import ReplayAnswers, ReplayPart, ReplayPointer, ReplayQuestions
    from vlmpipe.trainer.storage import open_storage
    from vlmpipe.trainer.storage.base import Storage
    from vlmpipe.trainer.storage.records import read_record, write_record

SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "question", "answer", "split")] + [("image", pa.binary())])
COUNTS = "counts"  # folder of each part's ReplayPart
MIN_USABLE = 0.1  # share of the questions: of fewer answers, most are cut or empty, and the rest are no sample of all


@dataclass(frozen=True)
class _Row:
    identity: str
    image: bytes
    question: str


def answer(job: JobConfig, worker: ProcessContext) -> ReplayAnswers:
    """Answer questions without answers in the folder that the run points to. Collective.

    Raises DataError where fewer than MIN_USABLE of the answers can be used.
    """
    store = open_storage(ReplayPointer.require(open_storage(job.run.run_uri)).folder)
    questions = ReplayQuestions.require(store)
    progress = Progress(job.run.run_uri, "replay") if worker.is_first else None
    missing = agree([number for number in range(questions.parts) if store.stat(_counts(number)) is None])
    assigned = missing[worker.rank :: worker.world_size]
    model = answering_start(job, worker) if missing else None  # on all ranks: a node's first one writes its files
    for done, number in enumerate(assigned):
        assert model
        if progress:
            progress.update(done, len(assigned), unit="parts", message="answers of the start model")
        _answer_part(job, model, store, number, worker)
    meet(worker)
    answers = on_first(worker, lambda: _finish(job, store, questions))
    if progress:
        progress.update(questions.images, questions.images, unit="images", message="")
        progress.finish(message=answers.described(questions))
    return answers


def _counts(number: int) -> str:
    return f"{COUNTS}/{part_name(number)}.json"


def _answer_part(job: JobConfig, model: AnsweringModel, store: Storage, number: int, worker: ProcessContext) -> None:
    started = time.perf_counter()
    table = pq.read_table(store.fetch(f"{QUESTIONS}/{part_name(number)}.parquet")).to_pylist()
    rows = [_Row(prompt["id"], prompt["image"], prompt["question"]) for prompt in table]
    samples, counts = list[dict[str, object]](), ReplayPart()
    for start in range(0, len(rows), job.evaluate.batch_questions):
        answered, part_counts = _answered(job, model, rows[start : start + job.evaluate.batch_questions], worker)
        samples += answered
        counts = _sum([counts, part_counts])
    if store.stat(_counts(number)):  # another run's job was faster, and its data may be prepared from that file now
        return
    with tempfile.TemporaryDirectory(prefix="vlmpipe-replay-") as folder:
        path = Path(folder, "part.parquet")
        pq.write_table(pa.Table.from_pylist(samples, schema=SCHEMA), path)
        store.upload(path, f"{REPLAY_SAMPLES}/{part_name(number)}.parquet")
    counts = counts.model_copy(update={"answer_s": time.perf_counter() - started})
    write_record(store, _counts(number), counts.model_dump(exclude={"record_version"}))


def _answered(
    job: JobConfig, model: AnsweringModel, rows: Sequence[_Row], worker: ProcessContext
) -> tuple[list[dict[str, object]], ReplayPart]:
    """Samples of these questions; those without a usable answer are counted."""
    replay = job.data.replay
    assert replay
    asked, refused = [], 0
    for prompt in rows:
        try:
            asked.append((prompt, ask_about(job, model.chat, prompt.question, prompt.image, prompt.identity)))
        except DataError:
            refused += 1
    if not asked:
        return [], ReplayPart(refused=refused)
    questions = [question for _, question in asked]
    answers = answer_questions(job, model, questions, worker.device, max_new_tokens=replay.replay_max_new_tokens)
    samples, cut, empty = list[dict[str, object]](), 0, 0
    for (prompt, _), generated in zip(asked, answers, strict=True):
        if generated.finish_reason == "length":
            cut += 1
        elif not generated.text:
            empty += 1
        else:
            text = {"id": prompt.identity, "question": prompt.question, "answer": generated.text, "split": "train"}
            samples.append({**text, "image": prompt.image})
    tokens = sum(len(ids) + 1 for ids in model.chat.tokenizer([generated.text for generated in answers]).input_ids)
    prompts = sum(
        len(model.chat.prompt(asking.turn, asking.prompted.counts, asking.prompted.sizes)) for asking in questions
    )
    return samples, ReplayPart(
        answered=len(samples), cut=cut, empty=empty, refused=refused, answer_tokens=tokens, prompt_tokens=prompts
    )


def _finish(job: JobConfig, store: Storage, questions: ReplayQuestions) -> ReplayAnswers:
    parts = [ReplayPart.of(read_record(store, _counts(number)), store.uri(_counts(number))) for number in
             range(questions.parts)]  # fmt: skip
    answers, replay = ReplayAnswers(**_sum(parts).model_dump()), job.data.replay
    assert replay
    if answers.answered < MIN_USABLE * questions.images:
        raise DataError(
            f"{answers.answered / questions.images:.1%} of the start model's answers can be learned: "
            f"{answers.described(questions)}",
            expected=f"at least {MIN_USABLE:.0%} that are not empty and end within replay_max_new_tokens",
            fix=f"raise replay_max_new_tokens, now {replay.replay_max_new_tokens}, or give replay_prompts with "
            "questions that it was trained on",
        )
    answers.write(store)
    return answers


def _sum(parts: Sequence[ReplayPart]) -> ReplayPart:
    names = set(ReplayPart.model_fields) - {"record_version"}
    return ReplayPart(**{name: sum(getattr(part, name) for part in parts) for name in names})


def main() -> None:
    """Answer on this rank."""
    parser = argparse.ArgumentParser(prog="vlmpipe.trainer.evaluation.replay.answer", description=__doc__)
    parser.add_argument("--config", required=True, help="URI of the run's run.json")
    options = parser.parse_args()
    job = JobConfig.load(options.config)
    use_threads(job.data.loader_threads)
    answer(job, start_worker(PATIENCE, shares_gpus=True))


if __name__ == "__main__":
    run_worker(main)
