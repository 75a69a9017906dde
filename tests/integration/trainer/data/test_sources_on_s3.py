"""Data sets on a real S3 server, whose objects may have no CRC32C, are those of a folder; metrics are copied there."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.data.prepared import llava_folder
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.sample import Sample
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.monitoring.trackers import open_tensorboard
from vlmpipe.trainer.storage.model_folders import local_folder, revision_of
from vlmpipe.trainer.storage.s3 import S3Storage


def samples(source: str, **settings: str) -> list[Sample]:
    found = list(open_source(DataConfig(source=source, sequence_length=100, **settings)))
    assert all(isinstance(one, Sample) for one in found)
    return [one for one in found if isinstance(one, Sample)]


def put(store: S3Storage, path: Path, name: str, *, foreign: bool) -> None:
    """As this program writes it, or as another does, without a CRC32C."""
    if foreign:
        store._client.put_object(**store._at(name), Body=path.read_bytes())
    else:
        store.upload(path, name)


@pytest.mark.parametrize("foreign", [False, True], ids=["ours", "foreign"])
def test_a_data_set_on_s3_is_that_of_a_folder(foreign: bool, s3: S3Storage, tmp_path: Path) -> None:
    folder, records = llava_folder(tmp_path / "set", count=6)
    (folder / "data.json").write_text(json.dumps(records))
    for path in folder.rglob("*.*"):
        put(s3, path, f"set/{path.relative_to(folder)}", foreign=foreign)
    there, here = samples(s3.uri("set/data.json")), samples(str(folder / "data.json"))
    assert len(there) == 6 and [one.turns for one in there] == [one.turns for one in here]
    # Size and checksum decide the split: an image has the same one in both places.
    assert [one.images[0].content() for one in there] == [one.images[0].content() for one in here]
    assert [one.images[0].read() for one in there] == [one.images[0].read() for one in here]


@pytest.mark.parametrize("foreign", [False, True], ids=["ours", "foreign"])
def test_parquet_on_s3_is_read_through_the_cache(foreign: bool, s3: S3Storage, tmp_path: Path) -> None:
    rows = [{"image": {"bytes": bytes([n]) * 100, "path": f"{n}.png"}, "text": f"text {n}"} for n in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    put(s3, tmp_path / "a.parquet", "set/a.parquet", foreign=foreign)
    assert [one.images[0].read() for one in samples(s3.uri("set"))] == [row["image"]["bytes"] for row in rows]


def test_weights_on_s3_are_copied_once_for_each_revision(s3: S3Storage) -> None:
    s3.write("model/config.json", b"{}")
    s3.write("model/model.safetensors", b"weights")
    first = local_folder(s3.uri("model"))
    assert first and (first / "model.safetensors").read_bytes() == b"weights"
    before = revision_of(s3.uri("model"))
    s3.write("model/model.safetensors", b"others")
    second = local_folder(s3.uri("model"))
    assert second != first and revision_of(s3.uri("model")) != before
    assert second and (second / "model.safetensors").read_bytes() == b"others"


def test_tensorboards_file_is_copied_where_nothing_mounts_the_bucket(
    s3: S3Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIP_TENSORBOARD_LOG_DIR", raising=False)
    log = open_tensorboard(s3.uri("run"))
    assert log
    log.write(10, {"loss": 2.5})
    log.close()
    (copied,) = s3.list("run/logs")
    s3.download(copied.name, tmp_path / Path(copied.name).name)
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in found.Scalars("train/loss")] == [(10, 2.5)]
