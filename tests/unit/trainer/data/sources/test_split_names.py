"""Names of files and folders decide the split: what is called a test is never trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.data.formats import add_member
from tests.support.data.prepared import png
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.sample import SPLIT_NAMES, Sample, Split
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.data.sources.base import Source
from vlmpipe.trainer.data.sources.split_names import split_in, stated_splits
from vlmpipe.trainer.errors import DataError

ROW: dict[str, Any] = {"question": "Which?", "answer": "This."}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("data/train-00000-of-00002.parquet", "train"), ("data/validation-00000-of-00001.parquet", "eval"),
        ("test-00000.tar", "eval"), ("val.jsonl", "eval"), ("dev.json", "eval"), ("coco/val2014/000.tar", "eval"),
        ("set-train.arrow", "train"), ("Test/a.tar", "eval"), ("train/part-0.tar", "train"), ("a.train_1.tar", "train"),
        ("contest-001.tar", None), ("latest.parquet", None), ("train_test_split.parquet", None), ("a/b-001.tar", None),
        ("train/val-0.tar", "eval"), ("evaluator/0.tar", None), ("testing.jsonl", "eval"),
        ("refcoco_testA.json", "eval"), ("minival2014/0.tar", "eval"), ("evaluation/0.tar", "eval"),
    ],
)  # fmt: skip
def test_a_word_of_the_name_states_the_split(name: str, split: Split | None) -> None:
    assert split_in(name) == split


@given(st.sampled_from(sorted(SPLIT_NAMES)), st.sampled_from("-_."), st.integers(0, 99999))
def test_whatever_stands_around_the_word(word: str, between: str, number: int) -> None:
    for name in (f"{word}{between}{number:05d}.tar", f"set{between}{word}.parquet", f"{word}/x{between}{number}.jsonl"):
        assert split_in(name) == SPLIT_NAMES[word]


def test_names_count_where_they_hold_something_out() -> None:
    assert stated_splits(["train-0.tar", "train-1.tar"]) == {}, "the fraction decides, as without names"
    assert stated_splits(["test.jsonl"]) == {}, "the run file names this file itself"
    assert stated_splits(["train-0.tar", "test-0.tar", "x.tar"]) == {"train-0.tar": "train", "test-0.tar": "eval"}


def write_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([ROW] * 3), path)


def write_arrow(path: Path) -> None:
    rows = pa.Table.from_pylist([ROW] * 3)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as stream:
        stream.write_table(rows)


def write_lines(path: Path) -> None:
    path.write_text(f"{json.dumps(ROW)}\n" * 3, encoding="utf-8")


def write_tar(path: Path) -> None:
    import tarfile

    with tarfile.open(path, "w") as tar:
        for number in range(3):
            add_member(tar, f"{number}.png", png(number))
            add_member(tar, f"{number}.txt", b"This.")


def opened(folder: Path, **data: Any) -> Source:
    return open_source(DataConfig(source=str(folder), sequence_length=100, **data))


def splits(source: Source) -> list[Split | None]:
    assert all(isinstance(one, Sample) for one in source)
    return [one.split for one in source if isinstance(one, Sample)]


@pytest.mark.parametrize(
    ("suffix", "write"),
    [("parquet", write_parquet), ("arrow", write_arrow), ("jsonl", write_lines), ("tar", write_tar)],
)
def test_every_format_is_split_by_the_names_of_its_files(
    tmp_path: Path, suffix: str, write: Callable[[Path], None]
) -> None:
    for word in ("train", "validation", "test"):
        write(tmp_path / f"{word}-00000-of-00001.{suffix}")
    source = opened(tmp_path)
    assert splits(source) == ["eval"] * 3 + ["train"] * 3 + ["eval"] * 3  # test, train, validation
    assert "2 of 3 files are held out" in source.notes()[0]
    ignoring = opened(tmp_path, file_splits="ignored")
    assert splits(ignoring) == [None] * 9 and not ignoring.notes()


def test_a_records_own_split_counts_before_its_files(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps(ROW | {"split": "train"}) + "\n" + json.dumps(ROW) + "\n")
    (tmp_path / "train.jsonl").write_text(json.dumps(ROW | {"split": "dev"}) + "\n")
    assert splits(opened(tmp_path)) == ["train", "eval", "eval"]


def test_only_files_that_a_saved_set_names_are_data(tmp_path: Path) -> None:
    for name in ("data-00000-of-00001.arrow", "cache-1f.arrow", "tmpabc.arrow"):
        write_arrow(tmp_path / name)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    source = opened(tmp_path)
    assert len(list(source)) == 3 and "left out: cache-1f.arrow and 1 more" in source.notes()[0]
    (tmp_path / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match=r"names data-00000-of-00001\.arrow, which is missing"):
        opened(tmp_path)


def test_caches_beside_a_sets_files_are_not_data(tmp_path: Path) -> None:
    for name in ("set-train.arrow", "cache-1f.arrow"):
        write_arrow(tmp_path / name)
    assert len(list(opened(tmp_path))) == 3
