"""Every format holds exactly the samples of the shards, in their splits."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.data.prepared import (
    conversation,
    job_config,
    llava_folder,
    preferring,
    prepare_llava,
    run_prepare,
    write_json,
)
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.chat.messages import messages_of
from vlmpipe.trainer.data.export.export import ExportedData, export_data
from vlmpipe.trainer.data.sample import Sample, Turn
from vlmpipe.trainer.data.shards.prepared_files import DONE
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.errors import ConfigError, DataError
from vlmpipe.trainer.storage.file_sums import FileSum
from vlmpipe.trainer.storage.records import seal, unseal

Stored = dict[str, tuple[tuple[Turn, ...], list[bytes]]]  # by id
SPLITS = {"train": "train", "eval": "validation"}


def prepare(folder: Path, *, pairs: bool = False) -> str:
    """Prepared data of samples with one image, two, none, with a system text, and a bad one."""
    images, records = llava_folder(folder, 30)
    records[3] |= {
        "image": ["3.png", "4.png"],
        "conversations": conversation("A <image>, and\n<image>\nDo they differ?", "Yes."),
    }
    records[5] = {"id": "né/5", "conversations": conversation("Say nothing.", "Nothing.")}
    records[6]["conversations"].insert(0, {"from": "system", "value": "Be brief."})
    records[8]["conversations"] = []
    if pairs:
        records = [record | {"rejected": "No answer."} for record in records]
    source = write_json(folder / "data.json", records)
    config = job_config(folder / "root", source=str(source), image_folder=str(images), max_reject_fraction=0.1)
    return run_prepare(preferring(config) if pairs else config).uri


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepare(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepare(tmp_path_factory.mktemp("pairs"), pairs=True)


def stored(prepared_uri: str) -> dict[str, Stored]:
    """The samples of each split, read from the tars alone."""
    splits: dict[str, Stored] = {"train": {}, "validation": {}}
    for path in sorted(Path(prepared_uri, "shards").glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file
                if member.name.endswith(".json"):
                    record = json.load(file)
                    images: list[bytes] = []
                    turns = tuple(Turn(**turn) for turn in record["turns"])
                    splits[SPLITS[path.name.partition("-")[0]]][record["id"]] = turns, images
                else:
                    images.append(file.read())
    return splits


def without_slices(turns: tuple[Turn, ...]) -> list[dict[str, str]]:
    names = ("system", "question", "thinking", "answer", "rejected")
    return [{name: getattr(turn, name) for name in names} for turn in turns]


def read_back(folder: Path, files: tuple[str, ...]) -> Stored:
    """A split read by our own sources."""
    found: Stored = {}
    for name in files:
        for sample in open_source(DataConfig(source=str(folder / name), sequence_length=64)):
            assert isinstance(sample, Sample)
            found[sample.id] = sample.turns, [image.read() for image in sample.images]
    return found


def read_json_lines(folder: Path, exported: ExportedData, split: str) -> list[dict[str, Any]]:
    (name,) = exported.files[split]
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize("data_format", ["llava", "webdataset"])
@pytest.mark.parametrize("data", ["prepared", "pairs"])
def test_our_sources_read_back_what_the_shards_hold(
    tmp_path: Path, data_format: str, data: str, request: pytest.FixtureRequest
) -> None:
    uri, folder = request.getfixturevalue(data), tmp_path / "out"
    exported = export_data(uri, data_format, folder)
    for split, expected in stored(uri).items():
        found = read_back(folder, exported.files[split])
        assert {name: (without_slices(turns), images) for name, (turns, images) in found.items()} == {
            name: (without_slices(turns), images) for name, (turns, images) in expected.items()
        }
        assert len(found) == exported.samples[split]


@pytest.mark.parametrize("data_format", ["messages", "trl"])
def test_json_lines_hold_the_conversations_and_images_of_the_shards(
    tmp_path: Path, prepared: str, data_format: str
) -> None:
    exported = export_data(prepared, data_format, tmp_path / "out")
    for split, expected in stored(prepared).items():
        records = read_json_lines(tmp_path / "out", exported, split)
        assert [record["id"] for record in records] == list(expected)  # in the order of the shards
        for record in records:
            turns, images = expected[record["id"]]
            assert [(tmp_path / "out" / path).read_bytes() for path in record["images"]] == images
            assert [as_parts(message) for message in record["messages"]] == [
                (one.role, one.content, one.thinking) for one in messages_of(turns)
            ]


def as_parts(message: dict[str, Any]) -> tuple[str, tuple[str | None, ...], str]:
    """Role, texts and images, and thinking."""
    content = message["content"]
    if isinstance(content, str):
        parts: list[str | None] = []
        for number, text in enumerate(content.split("<image>")):
            parts += [None, text] if number else [text]
        content = tuple(part for part in parts if part != "")
    else:
        content = tuple({"text": part.get("text"), "image": None}[part["type"]] for part in content)
    return message["role"], content, message.get("reasoning_content", "")


def test_an_image_is_one_file_with_its_stored_bytes(tmp_path: Path, prepared: str) -> None:
    exported = export_data(prepared, "messages", tmp_path / "out")
    distinct = {
        hashlib.sha256(image).hexdigest(): image
        for samples in stored(prepared).values()
        for _, images in samples.values()
        for image in images
    }
    files = {path.stem: path.read_bytes() for path in (tmp_path / "out" / "media").rglob("*.png")}
    assert files == distinct and (len(distinct), exported.images) == (28, 29)  # 4.png is in two samples


def test_pairs_keep_the_rejected_answer_in_each_trainers_own_keys(tmp_path: Path, pairs: str) -> None:
    def record(data_format: str) -> dict[str, Any]:
        exported = export_data(pairs, data_format, tmp_path / data_format)
        records = [*read_json_lines(tmp_path / data_format, exported, "train")]
        return next(one for one in records if one["id"] == "sample-1")

    asked = [{"role": "user", "content": "<image>What is this?"}, {"role": "assistant", "content": "A picture."}]
    asked += [{"role": "user", "content": "Which one?"}]
    answer, rejected = ({"role": "assistant", "content": text} for text in ("Number 1.", "No answer."))
    images = record("messages")["images"]
    assert record("llama-factory") == {
        "id": "sample-1", "messages": asked, "chosen": answer, "rejected": rejected, "images": images
    }  # fmt: skip
    index = json.loads((tmp_path / "llama-factory" / "dataset_info.json").read_text())
    assert index["validation"]["ranking"] and index["train"]["columns"]["rejected"] == "rejected"
    typed = record("trl")
    assert typed["prompt"][0]["content"] == [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    assert [typed["chosen"][0]["content"], typed["rejected"][0]["content"]] == [
        [{"type": "text", "text": one["content"]}] for one in (answer, rejected)
    ]
    with pytest.raises(ConfigError, match="nemo has no place for a rejected answer"):
        export_data(pairs, "nemo", tmp_path / "nemo")


def test_indexes_name_the_files_and_the_media(tmp_path: Path) -> None:
    _, prepared = prepare_llava(tmp_path, count=20)
    for data_format, name in (("llama-factory", "dataset_info.json"), ("nemo", "meta.json")):
        folder = tmp_path / data_format
        exported = export_data(prepared.uri, data_format, folder)
        index = json.loads((folder / name).read_text())
        assert {split: (one["file_name"],) for split, one in index.items()} == exported.files
    record = json.loads((folder / "train.jsonl").read_text().splitlines()[0])
    assert Path(index["train"]["media_dir"], record["images"][0]).is_file()


@pytest.mark.parametrize(
    ("data_format", "message"), [("nemo", "nemo has no place for a system text"), ("jsonl", "no data format")]
)
def test_what_a_format_would_lose_is_refused(tmp_path: Path, prepared: str, data_format: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export_data(prepared, data_format, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_files_is_refused_and_left_as_it_is(tmp_path: Path, prepared: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "own.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        export_data(prepared, "messages", tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "own.txt"]


def blank_a_shard(prepared_uri: str) -> None:
    path = next(Path(prepared_uri, "shards").glob("train-*.tar"))
    path.write_bytes(bytes(path.stat().st_size))


def count_one_more_in_a_sidecar(prepared_uri: str) -> None:
    """As if the index lacked a sample of the shard."""
    path = next(Path(prepared_uri, "shards").glob("eval-*.json"))
    sidecar = json.loads(path.read_text())
    path.write_text(json.dumps(sidecar | {"samples": sidecar["samples"] + 1}))
    manifest = unseal(Path(prepared_uri, DONE).read_bytes())
    manifest["files"][f"shards/{path.name}"] = asdict(FileSum.of(path))
    Path(prepared_uri, DONE).write_bytes(seal(manifest))


@pytest.mark.parametrize(
    ("damage", "message"),
    [(blank_a_shard, "checksum"), (count_one_more_in_a_sidecar, "samples of the split eval, not")],
)
def test_damaged_data_exports_nothing(
    tmp_path: Path, prepared: str, damage: Callable[[str], None], message: str
) -> None:
    copy = shutil.copytree(prepared, tmp_path / "data")
    damage(str(copy))
    with pytest.raises(DataError, match=message):
        export_data(str(copy), "messages", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_killed_export_leaves_no_folder_of_that_name(tmp_path: Path, prepared: str) -> None:
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from vlmpipe.trainer.data.export import export, writers\n"
        "add, left = writers.JsonWriter.add, [5]\n"
        "def killed(self, sample):\n"
        "    left[0] -= 1\n"
        "    left[0] or os.kill(os.getpid(), signal.SIGKILL)\n"
        "    add(self, sample)\n"
        "writers.JsonWriter.add = killed\n"
        "export.export_data(sys.argv[1], 'messages', Path(sys.argv[2]))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, prepared, str(tmp_path / "out")], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [path.name.startswith(".tmp-") for path in tmp_path.iterdir()] == [True]
    assert export_data(prepared, "messages", tmp_path / "out").samples  # the next one is not in its way
    assert os.listdir(tmp_path / "out")
