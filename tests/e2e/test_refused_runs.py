"""What a person gets for a mistake in the run file or the data: a sentence and an exit code before training starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.data.prepared import llava_folder, record, write_json
from tests.support.short_form import chosen
from tests.support.terminal import vlmpipe
from tests.support.wrong_input import RUN_FILE, refused, with_run_file
from vlmpipe.trainer.errors import ExitCode

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a run file, to run commands in."""
    return with_run_file(tmp_path / "place")


# Mistakes that are found before anything starts


IMPOSSIBLE = {
    "unknown key": (
        [RUN_FILE, "train.global_batch_row=8"],
        ["train.global_batch_row: unknown key, did you mean train.global"],
    ),
    "no file": (["tini.yaml"], ["no run file tini.yaml", "expected: the path of a YAML run file"]),
    "micro-batch": (
        [RUN_FILE, "train.micro_batch_size=3"],
        ["global_batch_size 8 must be a multiple of micro_batch_size 3"],
    ),
    "replicas": (
        [RUN_FILE, "cluster.replica_count=3"],
        ["train.global_batch_size: found 8, expected a multiple of 6", "cluster.replica_count 3"],
    ),
    "root": (
        [RUN_FILE, f"output.root_uri={RUN_FILE}/runs"],
        [f"{RUN_FILE} is not a folder", "set output.root_uri to another"],
    ),
}


# How fields are refused is tested without a process, in tests/unit/vlmpipe/config.
@pytest.mark.parametrize(("arguments", "words"), chosen(IMPOSSIBLE, lambda name: name in ("replicas", "root")).values())
def test_an_impossible_run_file_is_refused_before_anything_is_written(
    place: Path, arguments: list[str], words: list[str]
) -> None:
    refused(vlmpipe(place, "run", *arguments), ExitCode.CONFIG, *words)
    assert os.listdir(place) == [RUN_FILE]


def test_an_unwritable_output_folder_ends_with_no_permission(place: Path) -> None:
    """Nobody may make a folder in /sys, not even root, whom permission bits do not bind."""
    answer = vlmpipe(place, "run", RUN_FILE, "output.root_uri=/sys/vlmpipe")
    refused(answer, ExitCode.NO_PERMISSION, "output.root_uri is /sys/vlmpipe", "set output.root_uri to another folder")


# Mistakes in the data


SOURCES = {
    "missing": (None, ExitCode.CONFIG, ["data.source 'data.json' does not exist", "an existing LLaVA file"]),
    "not JSON": ("cats, dogs", ExitCode.DATA, ["data.json is not JSON", "one JSON array of LLaVA records"]),
    "not LLaVA": (
        '[{"prompt": "What is this?", "label": "A cat."}]',
        ExitCode.DATA,
        ["data.json is not in LLaVA's format: found an object with the keys 'prompt', 'label'"],
    ),
}
# The other sentences without a process: tests/unit/trainer/data/sources.
SHORT = chosen(SOURCES, lambda name: name == "not LLaVA")


@pytest.mark.parametrize(("content", "code", "words"), SHORT.values(), ids=SHORT)
def test_check_says_what_is_wrong_with_a_source(place: Path, content: str | None, code: int, words: list[str]) -> None:
    if content is not None:
        (place / "data.json").write_text(content)
    answer = vlmpipe(place, "check", RUN_FILE, "data.source=data.json")
    assert answer.code == code and "Traceback" not in answer.said
    said = answer.words.replace(" ", "")  # a long path is broken wherever the line ends
    for word in words:
        assert word.replace(" ", "") in said


@pytest.mark.slow  # its sentence: tests/unit/trainer/data/sources/test_llava.py; preparation that fails in a step: next
def test_an_image_folder_without_images_ends_the_run_with_a_message(place: Path) -> None:
    write_json(place / "data.json", [record(number) for number in range(20)])
    (place / "images").mkdir()
    answer = vlmpipe(place, "run", RUN_FILE, "data.source=data.json", "data.image_folder=images")
    refused(answer, ExitCode.DATA, "step prepare-data failed", "data.image_folder 'images' holds no images")
    assert not list(place.glob("runs/prepared/*"))


@pytest.mark.slow  # a run whose preparation fails, in words and with an exit code: tests/incidents/test_staged.py
def test_too_many_bad_samples_end_the_run_with_examples_and_nothing_prepared(place: Path) -> None:
    _, records = llava_folder(place, count=20)
    for number in range(5):
        (place / "images" / f"{number}.png").write_bytes(b"no picture")
    write_json(place / "data.json", records)
    answer = vlmpipe(place, "run", RUN_FILE, "data.source=data.json", "data.image_folder=images")
    refused(
        answer,
        ExitCode.DATA,
        "5 of 20 samples cannot be used",
        "image.unidentified (5), for example data.json record 1",
        "at most 2.0% rejected (data.max_reject_fraction)",
        "to do: correct the samples",
    )
    assert not list(place.glob("runs/prepared/*/DONE"))
