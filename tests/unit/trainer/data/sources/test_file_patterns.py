"""Which files a data.source means, and which format: by the path alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.data.formats import captioned, write_source
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.data.sources.file_patterns import find_files
from vlmpipe.trainer.errors import ConfigError, DataError, UserError


def tree(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


NAMES = ("a-000.tar", "a-001.tar", "a-002.tar", "b/a-003.tar", "c/a-004.tar", "notes.txt")


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a-001.tar", ["a-001.tar"]),
        ("a-{000..002}.tar", ["a-000.tar", "a-001.tar", "a-002.tar"]),
        ("a-{002..001}.tar", ["a-001.tar", "a-002.tar"]),
        ("a-{000,002}.tar", ["a-000.tar", "a-002.tar"]),
        ("*.tar", ["a-000.tar", "a-001.tar", "a-002.tar"]),
        ("{b,c}/*.tar", ["b/a-003.tar", "c/a-004.tar"]),
        ("*/a-00?.tar", ["b/a-003.tar", "c/a-004.tar"]),
        ("b", ["a-003.tar"]),
        ("b/", ["a-003.tar"]),
        ("", sorted(NAMES)),
    ],
)
def test_pattern_is_expanded_as_in_a_shell(tmp_path: Path, pattern: str, found: list[str]) -> None:
    tree(tmp_path, *NAMES)
    assert find_files(f"{tmp_path}/{pattern}").names == found


def test_a_relative_path_starts_at_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, "a.tar", "b/c.tar")
    monkeypatch.chdir(tmp_path)
    assert [find_files(source).names for source in ("a.tar", "b", "*.tar", "b/*.tar")] == [
        ["a.tar"],
        ["c.tar"],
        ["a.tar"],
        ["c.tar"],
    ]


def test_a_name_with_brackets_is_a_file_before_it_is_a_pattern(tmp_path: Path) -> None:
    tree(tmp_path, "a[1].tar", "a1.tar")
    assert find_files(f"{tmp_path}/a[1].tar").names == ["a[1].tar"]


@pytest.mark.parametrize("name", ["my [old] photos", "what?", "a{b,c}/d", "star*"])
def test_a_name_with_brackets_is_a_folder_before_it_is_a_pattern(name: str, tmp_path: Path) -> None:
    tree(tmp_path / name, "a.tar", "b.tar")
    files = find_files(str(tmp_path / name))
    assert files.is_folder and list(files.names) == ["a.tar", "b.tar"]


@pytest.mark.parametrize(
    ("pattern", "error", "message"),
    [
        ("a-{000..003}.tar", DataError, "1 of the files .* missing, the first is a-003.tar"),
        ("*.parquet", ConfigError, "matches no file"),
        ("nothing.tar", ConfigError, "does not exist"),
        ("a-{0..99999999}.tar", ConfigError, "at most 1000000"),
    ],
)
def test_missing_files_are_reported(tmp_path: Path, pattern: str, error: type[UserError], message: str) -> None:
    tree(tmp_path, *NAMES)
    with pytest.raises(error, match=message):
        find_files(f"{tmp_path}/{pattern}")


@pytest.mark.parametrize(
    ("names", "source", "message"),
    [
        (("a.tar", "b.parquet"), "", "holds .tar and .parquet"),
        (("a.txt",), "", "holds a.txt"),
        (("a.txt",), "a.txt", "unknown format: a.txt"),
        (("a.tar", "b.parquet"), "{a.tar,b.parquet}", "holds .tar and .parquet"),
    ],
)
def test_ambiguous_format_is_reported(tmp_path: Path, names: tuple[str, ...], source: str, message: str) -> None:
    tree(tmp_path, *names)
    with pytest.raises(ConfigError, match=message):
        open_source(DataConfig(source=f"{tmp_path}/{source}", sequence_length=100))


def test_tars_in_a_pattern_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    samples = captioned(6)
    write_source("webdataset", tmp_path / "set", samples)
    source = open_source(DataConfig(source=f"{tmp_path}/set/part-00000{{1,0}}.tar", sequence_length=100))
    assert [sample.id for sample in source] == [sample.name for sample in samples]


def test_an_empty_folder_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="is an empty folder"):
        find_files(str(tmp_path / "empty"))
