"""Data sets of the hub become a folder of Parquet files, whole or not at all. Without a network: from local files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.data.photo_folders import COLOURS, NUM, pictures
from vlmpipe.config.run_config import load_run_file
from vlmpipe.drafting import hub_data
from vlmpipe.drafting.hub_data import fetch
from vlmpipe.drafting.run_file import draft_run_file
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError


def test_without_the_extra_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError) as caught:
        fetch("owner/name", tmp_path / "a")
    assert caught.value.code == ExitCode.UNAVAILABLE and "pip install 'vlmpipe[hub]'" in caught.value.text()


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    package = pytest.importorskip("datasets", reason="the extra hub is not installed")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return package


def as_repository(folder: Path) -> Path:
    """Files as they lie in a data set's repository: two splits, one of two shards."""
    names = pictures(folder / "made")
    rows = [
        {"image": {"bytes": (folder / "made" / n).read_bytes(), "path": n}, "query": "Which?", "label": colour}
        for n, colour in names
    ]
    data = folder / "repository/data"
    data.mkdir(parents=True)
    for place, part in {
        "train-00000-of-00002": rows[:4],
        "train-00001-of-00002": rows[4:8],
        "test-00000-of-00001": rows[8:],
    }.items():
        pq.write_table(pa.Table.from_pylist(part), data / f"{place}.parquet")
    return folder / "repository"


@pytest.mark.usefixtures("datasets")
def test_a_data_set_is_fetched_whole_with_its_splits_and_can_be_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "fetched"
    found = fetch(str(as_repository(tmp_path)), folder)
    assert found.samples == {"train": 8, "test": 4} and found.size_bytes > 0
    assert {path.name for path in tmp_path.iterdir()} <= {"made", "repository", "cache", "fetched"}
    assert json.loads((folder / "fetched.json").read_text())["samples"] == found.samples
    assert {path.suffix for path in folder.iterdir()} == {".parquet", ".json"}
    path = tmp_path / "run.yaml"
    path.write_text(draft_run_file(folder, path).text)
    samples = list(open_source(load_run_file(path).data))
    assert len(samples) == NUM and [one.split for one in samples].count("eval") == 4
    assert {turn.answer for one in samples for turn in one.turns} == set(COLOURS)
    with pytest.raises(ConfigError, match="is not empty"):
        fetch("owner/name", folder)


def test_what_is_no_id_is_refused(tmp_path: Path, datasets: object) -> None:
    with pytest.raises(ConfigError, match="is no data set's id"):
        fetch("just-a-name", tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.usefixtures("datasets")
def test_a_hub_that_does_not_answer_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    api = HfApi(endpoint="http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setattr(hub_data, "_commit_of", lambda name, _revision: api.dataset_info(name).sha)
    with pytest.raises(UserError, match="the hub cannot be asked for owner/name") as caught:
        fetch("owner/name", tmp_path / "a")
    assert caught.value.code == ExitCode.UNAVAILABLE and not list(tmp_path.iterdir())


@pytest.mark.usefixtures("datasets")
@pytest.mark.parametrize("tables", [{}, {"a.csv": "x,y\n1,2\n", "b.csv": "z\n1\n"}])
def test_files_that_make_no_table_are_reported(tables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    for name, text in tables.items():
        (tmp_path / "files" / name).write_text(text)
    with pytest.raises(DataError, match="cannot be read as a table"):
        fetch(str(tmp_path / "files"), tmp_path / "a")
    assert {path.name for path in tmp_path.iterdir()} <= {"files", "cache"}


@pytest.mark.usefixtures("datasets")
def test_a_program_that_makes_a_data_set_is_not_run(tmp_path: Path) -> None:
    script = tmp_path / "made/made.py"
    script.parent.mkdir()
    script.write_text("raise SystemExit('it was run')")
    with pytest.raises(ConfigError, match="scripts are no longer supported") as caught:
        fetch(str(script.parent), tmp_path / "a")
    assert "--revision" in caught.value.text()


@pytest.mark.usefixtures("datasets")
def test_a_folder_needs_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--output is \."):
        fetch("owner/name", Path("."))


def errors() -> Iterator[tuple[BaseException, ExitCode, str]]:
    yield ConnectionError("offline mode"), ExitCode.UNAVAILABLE, "cannot be asked for owner/name: offline mode"
    yield ValueError("Config name is missing.\nPick one"), ExitCode.CONFIG, "--subset NAME"
    yield KeyboardInterrupt(), ExitCode.OK, ""


@pytest.mark.parametrize(("error", "code", "said"), list(errors()))
def test_a_fetch_that_fails_says_why_and_leaves_no_folder(
    error: BaseException, code: ExitCode, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets: object
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(hub_data, "_commit_of", lambda _name, _revision: "0123abc")
    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    with pytest.raises((UserError, KeyboardInterrupt)) as caught:
        fetch("owner/name", tmp_path / "a")
    assert not (tmp_path / "a").exists()
    if isinstance(caught.value, UserError):
        assert caught.value.code == code and said in caught.value.text()


def test_a_data_set_that_is_not_there_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets: object
) -> None:
    from datasets.exceptions import DatasetNotFoundError

    def fail(*_arguments: object) -> str:
        raise DatasetNotFoundError("no")

    monkeypatch.setattr(hub_data, "_commit_of", fail)
    with pytest.raises(UserError) as caught:
        fetch("owner/name", tmp_path / "a")
    assert caught.value.code == ExitCode.NOT_FOUND
