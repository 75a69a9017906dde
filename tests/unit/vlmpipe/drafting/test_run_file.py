"""`vlmpipe init --data`: the run file that it writes reads all of the data, and says what it could not see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.support.data.photo_folders import (
    COLOURS,
    NUM,
    as_captions,
    as_class_folders,
    as_json_lines,
    as_llava,
    as_metadata,
    as_other_columns,
    as_parquet,
    pictures,
    write_csv,
)
from tests.support.paths import ROOT
from vlmpipe.config.run_config import load_run_file
from vlmpipe.drafting.run_file import draft_run_file, run_file_name
from vlmpipe.trainer.data.prepare.look import look_at
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.errors import ConfigError, DataError

LAYOUTS = [as_metadata, as_other_columns, as_captions, as_class_folders, as_llava, as_json_lines, as_parquet]


@pytest.mark.parametrize("make", LAYOUTS)
def test_the_run_file_reads_every_sample(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By relative paths, as a user types them."""
    monkeypatch.chdir(tmp_path)
    place = make(Path("my photos"))
    draft = draft_run_file(place, Path("mine.yaml"))
    Path("mine.yaml").write_text(draft.text)
    config = load_run_file("mine.yaml")
    found = look_at(open_source(config.data), config.data)
    assert (found.read, found.coverage.images, found.bad, found.unreadable) == (NUM, NUM, [], [])
    answers = {turn.answer for sample in open_source(config.data) for turn in sample.turns}
    assert len(answers) == len(COLOURS) and all("red" in one or "blue" in one for one in answers)
    assert config.data.validation_fraction == 0.42, "of twelve images some are surely held out"
    assert config.data.sequence_length >= max(draft.facts.tokens)
    assert "max_position_embeddings" not in config.model.language_model.config, "the architecture's, which is longer"
    assert draft.facts.middle_size == (166, 120) and all(line in draft.text for line in ("gate:", "checkpoint_every"))


def test_a_draft_has_no_values_of_the_examples_project(tmp_path: Path) -> None:
    text = draft_run_file(as_llava(tmp_path / "a"), tmp_path / "a.yaml").text
    assert not {"gcp", "image_uri"} & {line.strip().partition(":")[0] for line in text.splitlines()}
    assert "example" not in text and "sha256" not in text and "docs first-run-on-vertex" in text


def test_what_cannot_be_seen_is_asked_in_comments(tmp_path: Path) -> None:
    text = draft_run_file(as_other_columns(tmp_path / "a"), tmp_path / "a.yaml").text
    comments = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    assert "Nothing reads shelf. Is something of it needed?" in comments
    assert (
        "Only 12 different images" in comments
        and "About 5 questions are in the validation split" in comments
        and "166 x 120 pixels" in comments
    )
    assert max(len(line) for line in text.splitlines() if line.startswith("#")) <= 100


@pytest.mark.parametrize("questions, share, asks", [(30, 0.42, True), (1, 0.1, False)])
def test_many_questions_about_few_images_hold_out_more_of_them(
    tmp_path: Path, questions: int, share: float, asks: bool
) -> None:
    """More samples than are checked: 30 questions about each of 12 images, or one about each of 360."""
    images = 360 // questions
    for number in range(images):
        Image.new("RGB", (64, 64), (number % 256, number // 256, 0)).save(tmp_path / f"{number}.png")
    rows = [
        {"file_name": f"{number}.png", "question": f"{asked}?", "answer": "yes"}
        for asked in range(questions)
        for number in range(images)
    ]
    write_csv(tmp_path / "metadata.csv", rows)
    draft = draft_run_file(tmp_path, tmp_path / "mine.yaml")
    (tmp_path / "mine.yaml").write_text(draft.text)
    assert load_run_file(tmp_path / "mine.yaml").data.validation_fraction == share
    assert (f"Only {images} different images" in draft.text) == asks


@pytest.mark.parametrize("stem", ["run", "9 lives", "--", "Größe", "a" * 90, "my_Photos.v2"])
def test_any_file_name_makes_a_name_that_a_run_file_may_have(stem: str) -> None:
    name = run_file_name(Path(f"{stem}.yaml"))
    changed = load_run_file(ROOT / "configs/digits.yaml", [f"name={name}"])
    assert changed.name == name


def test_long_texts_get_long_sequences_and_few_epochs(tmp_path: Path) -> None:
    rows = [
        {"file_name": name, "text": " ".join(f"w{number}x{i}" for i in range(90))}
        for number, (name, _) in enumerate(pictures(tmp_path / "a") * 30)
    ]
    write_csv(tmp_path / "a/metadata.csv", rows)
    path = tmp_path / "a.yaml"
    path.write_text(draft_run_file(tmp_path / "a", path).text)
    config = load_run_file(path)
    assert config.data.sequence_length >= 512 and config.train.epochs == 9 and config.model.tokenizer == "train:2000"
    assert config.evaluate.max_new_tokens == 64 and "answers are cut at 64" in path.read_text()


def two_tables(folder: Path) -> Path:
    pictures(folder)
    for name in ("a.csv", "b.csv"):
        write_csv(folder / name, [{"file_name": "0.png", "text": "a"}])
    return folder


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda folder: folder / "absent", ConfigError, "vlmpipe data fetch OWNER/NAME"),
        (lambda folder: pictures(folder) and folder, DataError, "12 images and no text to learn"),
        (lambda folder: pictures(folder) and folder / "0.png", ConfigError, "--data is one image"),
        (lambda folder: folder.mkdir() or folder, DataError, "no images and no table"),
        (two_tables, ConfigError, "holds 2 tables: a.csv, b.csv"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_learnt_from_is_a_sentence(
    make: Callable[[Path], Path], error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        draft_run_file(make(tmp_path / "a"), tmp_path / "a.yaml")
    assert said in caught.value.text()


def test_columns_by_semicolons_are_named(tmp_path: Path) -> None:
    pictures(tmp_path / "a")
    (tmp_path / "a/metadata.csv").write_text("file_name;question;answer\n0.png;Which?;red\n")
    with pytest.raises(DataError, match="'file_name;question;answer'"):
        draft_run_file(tmp_path / "a", tmp_path / "a.yaml")
