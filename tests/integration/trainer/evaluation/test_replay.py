"""The start model's answers as a source of the data: which images are asked about, by which model, and how often."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from tests.support.data.prepared import png, record, run_prepare
from tests.support.trainer.published_llava import SIZES, write_published
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.sources.data_source import REPLAY_PROMPTS
from vlmpipe.trainer.data.mixture import Mixture
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.tokenize import make_tokenizer
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import DataError, ExitCode, UserError
from vlmpipe.trainer.evaluation.answer import AnsweringModel, answer_questions, ask_about
from vlmpipe.trainer.evaluation.generate import GeneratedAnswer
from vlmpipe.trainer.evaluation.replay import answer as job_module
from vlmpipe.trainer.evaluation.replay.answer import answer
from vlmpipe.trainer.evaluation.replay.questions import answers_there, choose
from vlmpipe.trainer.evaluation.replay.start_model import answering_start
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.records.replay import ReplayAnswers
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record_file

WORKER = ProcessContext(0, 1, 0, 1, torch.device("cpu"))
IMAGES, PROMPTS = 60, ["What digit is this?", "What is this?"]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a LLaVA with its tokenizer."""
    folder = tmp_path_factory.mktemp("start")
    tokenizer = make_tokenizer("train:300", ["what digit is this? It is 7."])
    torch.manual_seed(7)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**SIZES, patch_size=8, image_size=32).to_dict(),
        text_config=LlamaConfig(**SIZES, num_key_value_heads=4, vocab_size=len(tokenizer)).to_dict(),
        image_seq_length=16,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    write_published(folder, config, LlavaForConditionalGeneration(config).state_dict())
    tokenizer.save_pretrained(folder)
    CLIPImageProcessorPil(size={"height": 32, "width": 32}, do_center_crop=False).save_pretrained(folder)
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Records of two samples an image; the bytes of image 1 are there under another name, too."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(IMAGES):
        (folder / f"{number}.png").write_bytes(png(number))
    (folder / "again.png").write_bytes(png(1))
    records = [{**record(number), "id": f"{number}-{n}"} for number in range(IMAGES) for n in range(2)]
    again = {**record(1), "id": "again", "image": "again.png"}
    path = tmp_path / "data.json"
    path.write_text(json.dumps([*records, again]))
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that the start model is asked. Every fifth of its answers counts as cut, others as ended."""
    sizes: list[int] = []

    def ended(*arguments: Any, **options: Any) -> list[GeneratedAnswer]:
        found = answer_questions(*arguments, **options)
        first = sum(sizes)
        sizes.append(len(found))
        return [
            dataclasses.replace(one, text=one.text or "-", finish_reason="length" if n % 5 == 4 else "stop")
            for n, one in enumerate(found, first)
        ]

    monkeypatch.setattr(job_module, "answer_questions", ended)
    return sizes


def job_of(start: Path, pictures: Path, run_id: str = "r1", **replay: Any) -> JobConfig:
    source = {"name": "before", "replay": "self", "weight": 0.25, "replay_prompts": PROMPTS, "replay_images": 1.0}
    own = {"name": "own", "uri": str(pictures), "weight": 0.75}
    if (folder := pictures.parent / "images").exists() and "text" not in pictures.name:
        own["image_folder"] = str(folder)
    model = {
        "pretrained": {"weights": str(start)}, "tokenizer": str(start), "image_size": 32, "feature_layer": -2,
        "feature_select": "drop_cls",
    }  # fmt: skip
    data = {"sources": [own, source | {"replay_max_new_tokens": 3} | replay], "sequence_length": 128}
    data |= {"validation_fraction": 0.3, "chat_template": "vlmpipe", "max_split_error": 1.0}
    run = {"run_id": run_id, "root_uri": str(pictures.parent / "root")}
    return JobConfig.model_validate(merged(TINY, {"model": model, "data": data, "run": run}))


def chosen(job: JobConfig) -> Any:
    return choose(job, Progress(job.run.run_uri, "choose-replay", quiet=True))


def samples_of(folder: str) -> list[dict[str, Any]]:
    tables = map(pq.read_table, sorted(Path(folder, "samples").glob("*.parquet")))
    return [row for table in tables for row in table.to_pylist()]


def images_of(job: JobConfig, split: str) -> set[str]:
    index = Index.load(run_prepare(job).uri).split(split)
    return {sha for number in range(len(index)) for sha in index.image_sha256(number)}


def test_the_start_model_answers_about_training_images_once_and_its_answers_are_drawn_in_their_share(
    start: Path, pictures: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(start, pictures)
    alone = job.model_copy(update={"data": job.data.without_replay()})
    trained, held_out = images_of(alone, "train"), images_of(alone, "eval")
    questions = chosen(job)
    assert questions.answers is None and answers_there(job) is None
    assert (questions.questions.images, questions.questions.in_validation) == (len(trained), 0)
    with pytest.raises(UserError, match="not there yet") as missing:
        run_prepare(job_of(start, pictures, "r0", replay_seed=1))
    assert missing.value.code == ExitCode.NOT_FOUND
    answers = answer(job, WORKER)
    assert sum(asked) == len(trained) == answers.answered + answers.cut and answers.cut == len(trained) // 5
    rows = samples_of(questions.folder)
    assert {row["question"] for row in rows} == set(PROMPTS)
    # By the engine of the evaluation, with the weights as transformers loads them.
    model = answering_start(job, WORKER)
    theirs = LlavaForConditionalGeneration.from_pretrained(start, dtype=torch.float32).eval()
    assert weights_of(model) == {name: tensor.sum().item() for name, tensor in theirs.state_dict().items()}
    given = [ask_about(job, model.chat, row["question"], row["image"], "") for row in rows]
    found = answer_questions(job, model, given, WORKER.device, max_new_tokens=3)
    assert [row["answer"] for row in rows] == [one.text or "-" for one in found]
    prepared = Index.load(run_prepare(job).uri)
    train, held = prepared.split("train"), prepared.split("eval")
    replayed = [number for number, identity in enumerate(train.ids) if identity.startswith("before/")]
    assert len(replayed) == answers.answered and not any(name.startswith("before/") for name in held.ids)
    shown = {sha for number in replayed for sha in train.image_sha256(number)}
    assert shown <= trained and shown.isdisjoint(held_out)
    assert {sha for number in range(len(held)) for sha in held.image_sha256(number)} == held_out
    drawn = Mixture(train, job.data, seed=0).drawn(0)
    assert sum(number in set(replayed) for number in drawn) == round(len(drawn) / 4)
    # A resumed run, and a later one of the same data, ask nothing again.
    assert answers_there(job_of(start, pictures, replay_max_new_tokens=2)) is None
    monkeypatch.setattr(job_module, "answering_start", never)
    for again in (job, job_of(start, pictures, "later")):
        assert answers_there(again) == chosen(again).answers == answers
        assert answer(again, WORKER) == answers
        assert run_prepare(again).reused


def weights_of(model: AnsweringModel) -> dict[str, float]:
    return {name: tensor.sum().item() for name, tensor in model.model.state_dict().items()}


def never(*_: Any) -> None:
    raise AssertionError("nothing is missing")


def test_a_job_that_was_stopped_answers_only_what_is_missing(
    start: Path, pictures: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmpipe.trainer.data.replay.part_size.MIN_ROWS", 10)
    job = job_of(start, pictures)
    found = chosen(job)
    whole = answer(job, WORKER)
    rows, folder = samples_of(found.folder), Path(found.folder)
    (folder / ReplayAnswers.FILE).unlink()
    (folder / "counts/00001.json").unlink()
    asked.clear()
    again = answer(job, WORKER)
    assert sum(asked) == 10 and samples_of(found.folder) == rows
    assert without_time(again) == without_time(whole)


def without_time(answers: Any) -> dict[str, Any]:
    return {name: value for name, value in answers.model_dump().items() if name != "answer_s"}


def test_a_share_is_chosen_by_seed_and_other_weights_or_questions_are_other_answers(
    start: Path, pictures: Path, tmp_path: Path
) -> None:
    some, other = chosen(job_of(start, pictures, replay_images=0.4)), chosen(job_of(start, pictures, replay_seed=1))
    assert 0 < some.questions.images < some.questions.training_images / 2 + 8
    assert chosen(job_of(start, pictures, replay_images=0.4)).questions == some.questions
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n\n")
    named = chosen(job_of(start, pictures, replay_seed=1, replay_prompts=str(file)))
    assert named.folder == other.folder, "the same questions, from a file"
    file.write_text("Is it a digit?")
    changed = chosen(job_of(start, pictures, replay_seed=1, replay_prompts=str(file)))
    assert len({some.folder, other.folder, changed.folder}) == 3
    left_out = [{"id": f"own/{number}-{n}"} for number in range(2, IMAGES) for n in (0, 1)]
    (tmp_path / "exclude.jsonl").write_text("\n".join(map(json.dumps, left_out)))
    few = job_of(start, pictures)
    few = few.model_copy(update={"data": few.data.model_copy(update={"exclude": str(tmp_path / "exclude.jsonl")})})
    assert chosen(few).questions.training_images <= 3, "images 0 and 1, and its copy"
    config = start / "model.safetensors.index.json"
    config.write_text(config.read_text() + " ")
    assert chosen(job_of(start, pictures, replay_images=0.4)).folder != some.folder


def test_what_cannot_be_learned_from_is_refused(
    start: Path, tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {"id": "1", "conversations": record(0)["conversations"]}
    for turn in text["conversations"]:
        turn["value"] = turn["value"].replace("<image>", "").strip()
    (tmp_path / "text.json").write_text(json.dumps([{**text, "id": str(n)} for n in range(20)]))
    with pytest.raises(DataError, match="no training images"):
        chosen(job_of(start, tmp_path / "text.json"))

    number = itertools.count()

    def cut(_job: JobConfig, _model: object, asked: Sequence[object], *_: Any, **__: Any) -> list[GeneratedAnswer]:
        return [GeneratedAnswer("a b c", "stop" if next(number) < 2 else "length") for _ in asked]

    monkeypatch.setattr(job_module, "answer_questions", cut)
    job = job_of(start, pictures)
    images = chosen(job).questions.images
    with pytest.raises(UserError, match=r"of the start model's answers can be learned: 2 answers") as refused:
        answer(job, WORKER)
    assert refused.value.code == ExitCode.DATA and 0.1 * images > 2
    assert f"{2 / images:.1%}" in refused.value.found and f"to {images} questions" in refused.value.found
    assert f"{images - 2} longer than replay_max_new_tokens" in refused.value.found
    assert chosen(job).answers is None, "no run takes them"
    assert read_record_file(Path(chosen(job).folder) / "counts/00000.json")["answered"] == 2


@pytest.fixture
def run_of_start(start: Path, tmp_path: Path) -> Path:
    """The folder of a run with the start as its export, trained on 40 images with questions of their own."""
    images, run = tmp_path / "before", tmp_path / "root/runs/first"
    images.mkdir()
    shutil.copytree(start, run / "export")
    for number in range(100, 140):
        (images / f"{number}.png").write_bytes(png(number))
    (images / "7.png").write_bytes(png(7))  # of the later run's data, too
    records = [{**record(number), "id": f"old-{number}"} for number in (7, *range(100, 140))]
    text = {**record(0), "id": "text"}
    text = {name: value for name, value in text.items() if name != "image"}
    text["conversations"] = [{**turn, "value": turn["value"].replace("<image>", "")} for turn in text["conversations"]]
    path = tmp_path / "before.json"
    path.write_text(json.dumps([*records, text]))
    settings = {"source": str(path), "image_folder": str(images), "validation_fraction": 0.2}
    job = job_of(start, path, "first")
    data = job.data.model_copy(update={"sources": (), **settings})
    job = job.model_copy(update={"data": data})
    pointers = DataPointers(prepared_uri=run_prepare(job).uri, features_uri="", features="off")
    pointers.write(open_storage(str(run)))
    return run


def questions_in(folder: str) -> list[dict[str, Any]]:
    tables = map(pq.read_table, sorted(Path(folder, "questions").glob("*.parquet")))
    return [row for table in tables for row in table.to_pylist()]


def test_a_start_from_a_run_is_asked_its_own_training_questions(
    run_of_start: Path, pictures: Path, asked: list[int]
) -> None:
    general = {"replay_prompts": list(REPLAY_PROMPTS)}
    job = job_of(run_of_start / "export", pictures, replay_images=0.5, **general)
    data = DataPointers.read(open_storage(str(run_of_start))).prepared_uri
    trained = Index.load(data).split("train")
    questions = chosen(job)
    counts = questions.questions
    assert counts.start_data == data and "own training data" in questions.described()
    drawn = counts.images + counts.in_validation + counts.unsuitable
    assert drawn == min(len(trained), math.ceil(0.5 * counts.training_images))
    rows = questions_in(questions.folder)
    assert {row["question"] for row in rows} == {"What is this?", "Which one?"}
    shown = [hashlib.sha256(row["image"]).hexdigest() for row in rows]
    assert len(set(shown)) == len(rows) and set(shown) <= {
        sha for n in range(len(trained)) for sha in trained.image_sha256(n)
    }
    assert set(shown).isdisjoint(images_of(job.model_copy(update={"data": job.data.without_replay()}), "eval"))
    answers = answer(job, WORKER)
    assert sum(asked) == counts.images
    # A run that resumes keeps its questions, also where the data of the start's run is gone; another one says so.
    shutil.rmtree(data)
    assert chosen(job).answers == answers and chosen(job).folder == questions.folder
    later = chosen(job_of(run_of_start / "export", pictures, "later", replay_images=0.5, **general))
    assert not later.questions.start_data and "there is no prepared data" in later.described()
    with pytest.raises(DataError, match="replay_about is start_data, but the data of"):
        chosen(job_of(run_of_start / "export", pictures, "asked", replay_about="start_data", **general))


def test_a_resumed_run_keeps_to_images_where_the_data_of_the_start_is_there_again(
    run_of_start: Path, pictures: Path
) -> None:
    job = job_of(run_of_start / "export", pictures, replay_prompts=list(REPLAY_PROMPTS))
    data = DataPointers.read(open_storage(str(run_of_start))).prepared_uri
    Path(data).rename(f"{data}-elsewhere")
    first = chosen(job)
    assert not first.questions.start_data and "there is no prepared data" in first.described()
    Path(f"{data}-elsewhere").rename(data)
    resumed = chosen(job)
    assert (resumed.folder, resumed.described()) == (first.folder, first.described())
    later = chosen(job_of(run_of_start / "export", pictures, "later", replay_prompts=list(REPLAY_PROMPTS)))
    assert later.questions.start_data == data


def test_a_missing_image_is_left_out_and_ends_nothing(start: Path, pictures: Path) -> None:
    whole = chosen(job_of(start, pictures)).questions
    for name in ("again", "0", "2", "3"):
        (pictures.parent / f"images/{name}.png").unlink()
        left = chosen(job_of(start, pictures, f"without-{name}", replay_seed=ord(name[0]))).questions
        assert left.images + left.unread + left.repeated + left.in_validation == left.training_images
    assert left.images < whole.images and left.unread
    assert f"{left.unread} images that cannot be read" in left.described("")


def test_a_sample_of_the_start_without_a_question_about_one_image_is_counted(
    run_of_start: Path, pictures: Path
) -> None:
    job = job_of(run_of_start / "export", pictures, replay_prompts=list(REPLAY_PROMPTS), replay_images=1.0)
    counts = chosen(job).questions
    trained = Index.load(counts.start_data).split("train")
    assert counts.unsuitable == ("text" in trained.ids)
    assert counts.in_validation == int("old-7" in trained.ids and counts.images + counts.unsuitable < len(trained))
    about_images = job_of(run_of_start / "export", pictures, "r2", replay_about="images", replay_prompts=PROMPTS)
    assert "replay_about is images" in chosen(about_images).described()
    prompted = chosen(job_of(run_of_start / "export", pictures, "r3"))
    assert "replay_prompts is given" in prompted.described() and not prompted.questions.start_data
