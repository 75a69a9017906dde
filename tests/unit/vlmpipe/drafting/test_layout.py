"""What is taken for data in a folder, and what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.data.photo_folders import NUM, pictures, write_csv
from vlmpipe.config.yaml_loader import parse_yaml
from vlmpipe.drafting.layout import find_layout
from vlmpipe.drafting.run_file import draft_run_file
from vlmpipe.trainer.errors import DataError


@pytest.mark.parametrize(
    ("line", "columns"),
    [
        ("0.png,a cat, sitting", "file_name, words"),
        (f"0.png,{'long' * 50_000}", "file_name, words"),
        ("0.png,a\rb,c", ""),
    ],
)
def test_a_line_that_is_not_like_the_header_is_left_to_the_source(line: str, columns: str, tmp_path: Path) -> None:
    (tmp_path / "metadata.csv").write_text(f"file_name,words\n{line}\n")
    assert find_layout(tmp_path).kind == "images with metadata.csv" + (f", columns {columns}" if columns else "")


@pytest.mark.parametrize("header", ["image,label", "Image,Answer", "IMAGE,Caption", "images,class"])
def test_columns_of_usual_names_are_read_from_a_table(header: str, tmp_path: Path) -> None:
    rows = "".join(f"{name},{colour}\n" for name, colour in pictures(tmp_path))
    (tmp_path / "rows.csv").write_text(f"{header}\n{rows}")
    draft = draft_run_file(tmp_path, tmp_path / "a.yaml")
    assert (draft.facts.read, draft.facts.coverage.images, draft.facts.bad) == (NUM, NUM, [])
    assert set(draft.facts.answers) == {"red", "blue"}


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv"])
def test_tables_of_splits_are_one_source(suffix: str, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    rows = [{"image": name, "question": "Which?", "answer": colour} for name, colour in pictures(folder / "images")]
    for name, part in {"train": rows[:8], "val": rows[8:]}.items():
        if suffix == ".csv":
            write_csv(folder / f"{name}.csv", part)
        else:
            lines = [json.dumps(row) for row in part]
            (folder / f"{name}{suffix}").write_text(
                f"[{','.join(lines)}]" if suffix == ".json" else "\n".join(lines) + "\n"
            )
    draft = draft_run_file(folder, tmp_path / "a.yaml")
    assert (draft.facts.splits, draft.facts.bad) == ({"train": 8, "eval": 4}, [])
    assert draft.layout.kind.startswith(f"images with train{suffix} and val{suffix}")


def test_a_folder_of_the_user_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/metadata.csv").write_text("file_name,text\n0.png,red\n")
    assert find_layout(Path("~/photos")).source == str(tmp_path / "photos")


def test_a_caption_of_other_characters_is_named(tmp_path: Path) -> None:
    pictures(tmp_path)
    (tmp_path / "0.txt").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(DataError, match=r"0\.txt is not UTF-8 at byte 2"):
        find_layout(tmp_path)


def test_folders_of_splits_state_splits_and_no_answers(tmp_path: Path) -> None:
    for folder in ("train/cat", "train/dog", "val/cat"):
        pictures(tmp_path / "classes" / folder)
    table = find_layout(tmp_path / "classes").table
    assert {(row["answer"], row["split"]) for row in table} == {("cat", "train"), ("dog", "train"), ("cat", "val")}
    for folder in ("train/cat", "train/dog"):
        pictures(tmp_path / "one" / folder)
    assert not any("split" in row for row in find_layout(tmp_path / "one").table), "some of them are to be held out"
    for folder in ("train", "val"):
        pictures(tmp_path / "plain" / folder)
    with pytest.raises(DataError, match="no text to learn"):
        find_layout(tmp_path / "plain")


def test_what_programs_hide_in_a_folder_is_no_data(tmp_path: Path) -> None:
    for folder in ("cat", "dog", "cat/.ipynb_checkpoints", "__MACOSX/cat"):
        pictures(tmp_path / folder)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/shard.parquet").write_bytes(b"")
    assert {row["answer"] for row in find_layout(tmp_path).table} == {"cat", "dog"}
    assert len(find_layout(tmp_path).table) == 2 * NUM


def test_names_of_the_data_cannot_write_into_the_run_file(tmp_path: Path) -> None:
    rows = [{"image": name, "question": "Which?", "answer": colour} for name, colour in pictures(tmp_path / "a")]
    (tmp_path / "a/rows.json").write_text(json.dumps([{**row, "a\u2028notify: {x: 1}\x85#": 1} for row in rows]))
    text = draft_run_file(tmp_path / "a", tmp_path / "a.yaml").text
    assert "notify" in text and "notify" not in parse_yaml(text, "a.yaml")
