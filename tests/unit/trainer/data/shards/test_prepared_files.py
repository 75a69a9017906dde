"""A flipped bit anywhere in prepared data is found before anything uses the file, and prepared anew by the next run."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.data.prepared import prepare_llava, prepared_files, run_prepare
from tests.support.short_form import WHOLE, chosen
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.prepared_files import DONE, open_prepared
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.data.tokenize import load_tokenizer
from vlmpipe.trainer.errors import DataError, ExitCode, UserError

EXAMPLES_VARIABLE = "VLMPIPE_FUZZ_EXAMPLES"
FLIPS = int(os.environ.get(EXAMPLES_VARIABLE, 300 if WHOLE else 50)) // 50  # of each file
ONE_OF_EACH_KIND = {DONE, "index.arrow", "stats.json", "tokenizer/tokenizer.json"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobConfig, Path]:
    config, made = prepare_llava(tmp_path_factory.mktemp("prepared"), count=30)
    return config, Path(made.uri)


def use(folder: Path) -> None:
    """Everything that training, evaluation and the report read."""
    store = open_prepared(str(folder))
    index = Index.load(str(folder))
    load_tokenizer(store)
    reader = ShardReader.open(store)
    for name in ("train", "eval"):
        split = index.split(name)  # type: ignore[arg-type]
        for number in range(len(split)):
            reader.images(split.sample_location(number))
    for info in store.list():
        if not info.name.endswith(".tar"):
            store.read(info.name)


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes() or b"\n")  # an empty file gets a byte
    place = draw.randrange(len(data))
    data[place] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, _: random.Random) -> None:
    path.write_bytes(path.read_bytes()[:-1] or b"\n")


def test_whole_data_can_be_used(
    prepared: tuple[JobConfig, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it lies: nothing of a local folder is copied into the cache of remote shards."""
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    use(prepared[1])
    assert not (tmp_path / "cache").exists()


@pytest.mark.timeout(300 + 10 * FLIPS)
@pytest.mark.parametrize("damage", [flip, truncate])
def test_damage_to_any_file_names_it(
    prepared: tuple[JobConfig, Path], tmp_path: Path, damage: Callable[[Path, random.Random], None]
) -> None:
    draw = random.Random(None if EXAMPLES_VARIABLE in os.environ else 7)
    names = list(prepared_files(str(prepared[1])))
    assert set(names) >= ONE_OF_EACH_KIND
    for name in names:
        for attempt in range(FLIPS if damage is flip else 1):
            folder = shutil.copytree(prepared[1], tmp_path / f"{attempt}" / name.replace("/", "-"))
            damage(folder / name, draw)
            with pytest.raises(DataError) as raised:
                use(folder)
            assert raised.value.code == ExitCode.DATA
            assert Path(name).stem in str(raised.value) and "is damaged" in str(raised.value), name


def test_missing_file_is_named(prepared: tuple[JobConfig, Path], tmp_path: Path) -> None:
    for name in prepared_files(str(prepared[1])):
        folder = shutil.copytree(prepared[1], tmp_path / name.replace("/", "-"))
        (folder / name).unlink()
        with pytest.raises(UserError, match=Path(name).stem):
            use(folder)


def test_a_file_that_the_manifest_does_not_list_is_not_read(prepared: tuple[JobConfig, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(prepared[1], tmp_path / "copy")
    (folder / "tokenizer/added_tokens.json").write_text("{}")
    use(folder)
    with pytest.raises(DataError, match="DONE does not list it"):
        open_prepared(str(folder)).read("tokenizer/added_tokens.json")


def test_next_preparation_replaces_damaged_data(prepared: tuple[JobConfig, Path], tmp_path: Path) -> None:
    config, folder = prepared
    before, draw = prepared_files(str(folder)), random.Random(3)
    assert run_prepare(config).reused
    for name in chosen(before, lambda name: name in ONE_OF_EACH_KIND or name.endswith("train-000000.tar")):
        flip(folder / name, draw)
        assert not run_prepare(config).reused, name
        assert prepared_files(str(folder)) == before
    assert run_prepare(config).reused
