"""Batch prediction: the questions that folders and tables give, and the rows that come of them.

The model is a stand-in; tests/e2e/test_serve.py asks a trained one.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from tests.support.paths import ROOT
from tests.support.trainer.tiny_runs import TINY
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.tokenize import make_tokenizer
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError
from vlmpipe.trainer.evaluation.answer import AnsweringModel, Asked
from vlmpipe.trainer.evaluation.batch_budget import BatchBudget
from vlmpipe.trainer.evaluation.generate import GeneratedAnswer
from vlmpipe.trainer.evaluation.prediction import predict as module
from vlmpipe.trainer.evaluation.prediction.answer_file import Answer, AnswerFile, ToAnswer
from vlmpipe.trainer.evaluation.prediction.predict import Predictor, predict
from vlmpipe.trainer.evaluation.prediction.questions import read_questions

SIZES = {"a.png": (8, 8), "deep/b.jpg": (16, 8), "c.png": (8, 24)}
JOB = JobConfig.model_validate(TINY | {"run": {"run_id": "one", "root_uri": "/runs"}})


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of three pictures, one that is none, and a file of another kind."""
    folder = tmp_path / "images"
    (folder / "deep").mkdir(parents=True)
    for name, size in SIZES.items():
        Image.new("RGB", size, "red").save(folder / name)
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n")
    (folder / "notes.txt").write_text("no picture")
    return folder


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that are asked. An answer is the picture's width and height, and the question's text."""
    sizes: list[int] = []

    def answer(
        job: JobConfig, model: AnsweringModel, asked: Sequence[Asked], *_: Any, max_new_tokens: int
    ) -> list[GeneratedAnswer]:
        assert max_new_tokens == TINY["evaluate"]["max_new_tokens"]
        sizes.append(len(asked))
        texts = [f"{one.shown.sizes[0]} {one.turn.question.removeprefix('<image>')}" for one in asked]
        return [GeneratedAnswer(text, "stop") for text in texts]

    chat = Chat(make_tokenizer("train:300", ["what is it?"] * 3))
    monkeypatch.setattr(
        module, "_answering_model", lambda job, device: AnsweringModel(None, None, chat, None, BatchBudget(10_000))
    )
    monkeypatch.setattr(module, "answer_questions", answer)
    return sizes


def test_a_folder_is_answered_in_order_and_a_broken_image_costs_its_row_only(
    images: Path, batches: list[int], tmp_path: Path
) -> None:
    questions = read_questions(images, "what is it?")
    found = predict(JOB, questions, tmp_path / "out/answers.jsonl", batch=3)
    assert (found.answered, found.failed, batches) == (3, 1, [2, 1])
    rows = [json.loads(line) for line in (tmp_path / "out/answers.jsonl").read_text().splitlines()]
    assert [Path(row["image"]).name for row in rows] == ["a.png", "broken.png", "c.png", "b.jpg"]
    assert [row["prediction"] for row in rows] == [
        "(8, 8) \nwhat is it?", "", "(8, 24) \nwhat is it?", "(16, 8) \nwhat is it?"
    ]  # fmt: skip
    assert [bool(row["error"]) for row in rows] == [False, True, False, False]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["answers.jsonl"], "nothing half-written"


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_a_tables_images_lie_beside_it_and_a_question_stands_in_for_a_missing_one(
    images: Path, batches: list[int], kind: str
) -> None:
    rows = [{"image": "a.png", "question": "how red?"}, {"image": "deep/b.jpg", "question": ""}]
    table = images / f"asked{kind}"
    if kind == ".jsonl":
        table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == ".csv":
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["image", "question"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), table)
    questions = read_questions(table, "what is it?")
    assert questions == [
        ToAnswer(images / "a.png", "how red?"), ToAnswer(images / "deep/b.jpg", "what is it?")
    ]  # fmt: skip
    predict(JOB, questions, images / "answers.parquet")
    assert pq.read_table(images / "answers.parquet").to_pylist()[0] == {
        "image": str(images / "a.png"), "question": "how red?", "prediction": "(8, 8) \nhow red?", "error": ""
    }  # fmt: skip


def test_a_folder_that_training_reads_is_its_table_and_answers_can_be_a_table_too(
    images: Path, batches: list[int]
) -> None:
    (images / "metadata.csv").write_text("file_name,question\nc.png,how tall?\na.png,how wide?\n")
    questions = read_questions(images, "")
    assert questions == [ToAnswer(images / "c.png", "how tall?"), ToAnswer(images / "a.png", "how wide?")]
    predict(JOB, questions, images / "answers.csv")
    with (images / "answers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["prediction"] for row in rows] == ["(8, 24) \nhow tall?", "(8, 8) \nhow wide?"]


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_a_stopped_prediction_continues_after_the_answers_that_were_there(
    images: Path, batches: list[int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions, output = read_questions(images, "what is it?"), images / f"answers{kind}"
    answering = module.answer_questions

    def stopped_at_the_third(*given: Any, max_new_tokens: int) -> list[GeneratedAnswer]:
        if len(batches) == 2:
            raise KeyboardInterrupt
        return answering(*given, max_new_tokens=max_new_tokens)

    monkeypatch.setattr(module, "answer_questions", stopped_at_the_third)
    with pytest.raises(UserError, match="stopped: 3 of 4 questions are answered") as stopped:
        predict(JOB, questions, output, batch=1)
    assert stopped.value.code == ExitCode.INTERRUPTED and "the same command continues" in stopped.value.fix
    partial = images / f"answers{kind}.partial"
    assert partial.is_file() and not output.exists()
    partial.write_text(partial.read_text() + '{"image": "b')  # what a kill may leave

    monkeypatch.setattr(module, "answer_questions", answering)
    found = predict(JOB, questions, output, batch=1)
    assert (found.answered, found.failed, found.continued, len(batches)) == (3, 1, 3, 3)
    whole = images / f"whole{kind}"
    predict(JOB, questions, whole)
    assert output.read_bytes() == whole.read_bytes()
    assert not list(images.glob("*.partial")) and not list(images.glob("*.tmp"))


def test_answers_of_another_model_or_to_other_questions_are_not_taken_over(images: Path, batches: list[int]) -> None:
    questions, output = read_questions(images, "what is it?"), images / "answers.jsonl"
    for model, changed, taken in (
        ("one", questions, 4),
        ("two", questions, 0),
        ("one", [questions[0], ToAnswer(images / "c.png", "how tall?"), *questions[2:]], 1),
    ):
        first = AnswerFile(output, "one", questions)
        first.write([Answer(str(each.image), each.question, "red") for each in questions])
        first.close(keep=True)
        second = AnswerFile(output, model, changed)
        second.close(keep=False)
        assert len(second.earlier) == taken
        left = f"{4 - taken} answers of an earlier start are not taken over"
        assert second.not_taken_over.startswith(left if taken < 4 else "")
        assert bool(second.not_taken_over) == (taken < 4)


def test_an_image_that_has_changed_since_is_asked_about_again(images: Path) -> None:
    questions, output = read_questions(images, "what is it?"), images / "answers.jsonl"
    rows = [Answer(str(each.image), each.question, "", "not an image") for each in questions]
    first = AnswerFile(output, "one", questions)
    first.write(rows[:3])
    put = images / "put"
    put.write_bytes(b"a mended image")
    os.utime(put, (1, 1))  # as an archive restores it: older than every answer
    put.replace(questions[2].image)  # after its answer, and before the next
    first.write(rows[3:])
    first.close(keep=True)
    second = AnswerFile(output, "one", questions)
    second.write(rows[2:])
    second.finish()
    assert second.earlier == rows[:2]
    found = f"2 answers of an earlier start are not taken over: {questions[2].image} has changed"
    assert second.not_taken_over == found
    assert [json.loads(line)["image"] for line in output.read_text().splitlines()] == [row.image for row in rows]


def test_two_predictions_into_one_file_are_refused_until_the_first_has_ended(images: Path) -> None:
    questions, output = read_questions(images, "what is it?"), images / "answers.jsonl"
    holder = (
        "import sys, pathlib\n"
        "from vlmpipe.trainer.evaluation.prediction.answer_file import Answer, AnswerFile, ToAnswer\n"
        "asked = [ToAnswer(pathlib.Path(path), 'what is it?') for path in sys.argv[2:]]\n"
        "file = AnswerFile(pathlib.Path(sys.argv[1]), 'one', asked)\n"
        "file.write([Answer(sys.argv[2], 'what is it?', 'red')])\n"
        "print('writing', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", holder, str(output), *(str(one.image) for one in questions)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout and other.stdout.readline() == b"writing\n"
        with pytest.raises(UserError, match="another process is writing answers into") as refused:
            AnswerFile(output, "one", questions)
        assert refused.value.code == ExitCode.UNAVAILABLE and "--output" in refused.value.fix
        other.kill()
    after = AnswerFile(output, "one", questions)
    after.close(keep=False)
    assert after.earlier == [Answer(str(questions[0].image), "what is it?", "red")], (
        "what was killed leaves its answers"
    )


def test_answers_outlive_a_damaged_export_and_a_stop_before_the_next_ones(
    images: Path, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions, output = read_questions(images, "what is it?"), images / "answers.jsonl"
    first = AnswerFile(output, module._name_of(JOB), questions)
    first.write([Answer(str(each.image), each.question, "red") for each in questions[:2]])
    first.close(keep=True)
    before = first.partial.read_bytes()

    def damaged(*_: Any) -> AnsweringModel:
        raise DataError("a file of the export is damaged")

    with monkeypatch.context() as patched:
        patched.setattr(module, "_answering_model", damaged)
        with pytest.raises(DataError, match="damaged"):
            predict(JOB, questions, output)
    assert first.partial.read_bytes() == before

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(AnswerFile, "write", stopped)
        with pytest.raises(UserError, match="2 of 4 questions are answered"):
            predict(JOB, questions, output)
    assert first.partial.read_bytes() == before
    assert predict(JOB, questions, output).continued == 2
    assert not list(images.glob("*.partial*"))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_file_name_that_is_not_utf_8_ends_nothing(
    kind: str, images: Path, batches: list[int], tmp_path: Path
) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    (images / "a.png").rename(images / name)
    questions, output = read_questions(images, "what is it?"), tmp_path / f"answers.{kind}"
    assert predict(JOB, questions, output).answered == 3
    if kind == "jsonl":
        found = [json.loads(line)["image"] for line in output.read_text(encoding="utf-8").splitlines()]
        assert str(images / name) in found, "the name itself, by which the file can be opened"
        return
    with output.open(encoding="utf-8", newline="") if kind == "csv" else output.open("rb") as file:
        rows = list(csv.DictReader(file)) if kind == "csv" else pq.read_table(file).to_pylist()  # type: ignore[arg-type]
    assert str(images / "caf?.png") in [row["image"] for row in rows]


def test_one_image_is_asked_about(images: Path, batches: list[int]) -> None:
    ((answer,),) = Predictor.load(JOB).answer(read_questions(images / "a.png", "how red?"))
    assert (answer.prediction, answer.error) == ("(8, 8) \nhow red?", "")


def test_a_system_text_that_the_chat_template_refuses_costs_its_row_only(
    images: Path, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = module._answering_model(JOB, torch.device("cpu")).chat
    one = ToAnswer(images / "a.png", "how red?", system="In one word.")
    assert module._asked(JOB, chat, one).turn.system == "In one word."

    def refuse(*_: Any) -> list[int]:
        raise RejectedError(RejectCode.CONV_TEMPLATE, "System role not supported")

    monkeypatch.setattr(chat, "prompt", refuse)
    with pytest.raises(DataError, match=r"a\.png: .*System role not supported"):
        module._asked(JOB, chat, one)
    module._asked(JOB, chat, ToAnswer(one.image, one.question))


def test_wrong_input_is_named(images: Path, batches: list[int], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder of images"):
        read_questions(images, "")
    (images / "asked.jsonl").write_text('{"image": "a.png"}\n')
    with pytest.raises(DataError, match=r"row 1 of .*asked\.jsonl has no question"):
        read_questions(images / "asked.jsonl", "")
    (images / "asked.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"is not a jsonl table"):
        read_questions(images / "asked.jsonl", "")
    with pytest.raises(ConfigError, match=r"a\.png is an image"):
        read_questions(images / "a.png", "")
    with pytest.raises(ConfigError, match=r"no table that can be read"):
        read_questions(images / "notes.txt", "")
    with pytest.raises(ConfigError, match=r"--output with \.txt"):
        predict(JOB, read_questions(images, "what?"), tmp_path / "answers.txt")
    with pytest.raises(DataError, match="none of 1 images can be asked about"):
        predict(JOB, [ToAnswer(images / "broken.png", "what?")], tmp_path / "answers.jsonl")
    assert not list(tmp_path.glob("answers*"))
