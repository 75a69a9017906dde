"""Prepared data of format 13, written by the version that had it, is refused with the command that converts it."""

from __future__ import annotations

import re
import shlex
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.fakes.gcs.server import FakeGcs
from tests.support.data.index import index_rows
from tests.support.data.prepared import job_config, llava_folder, png, prepared_files, record, run_prepare, write_json
from tests.support.gcs import QUICK_RETRY
from tests.support.paths import ROOT
from vlmpipe.cli.app import app
from vlmpipe.report.samples import PreparedImages
from vlmpipe.runs.folders.file_check import check_files
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.prepare import convert as module
from vlmpipe.trainer.data.prepare.convert import convert
from vlmpipe.trainer.data.prepare.fingerprint import find_prepared, fingerprint
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.index_file import NAME
from vlmpipe.trainer.data.shards.index_lines import LINES
from vlmpipe.trainer.data.shards.prepared_files import DONE, FORMAT, Manifest, OtherFormatError, open_prepared
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.errors import DataError, ExitCode, UserError
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.storage.gcs import GcsStorage
from vlmpipe.trainer.storage.local import LocalStorage

STORED = ROOT / "tests/fixtures/prepared_format_13.tar.xz"  # of `records` below
COUNT = 12
# The order of its first epoch, as the version that wrote it had it.
PLAN_DIGEST = "33016f038e667ffa289fa6366635b65e502a579dc66a7a360d7659c71b14e679"


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    """A run whose data the stored set is."""
    images, records = llava_folder(tmp_path, COUNT)
    return job_config(
        tmp_path / "root", source=str(write_json(tmp_path / "data.json", records)), image_folder=str(images)
    )


@pytest.fixture
def old(config: JobConfig) -> Path:
    """The stored set where the run looks for its data."""
    folder = Path(config.run.prepared_root)
    folder.mkdir(parents=True)
    with tarfile.open(STORED) as tar:
        tar.extractall(folder, filter="data")
    (stored,) = folder.iterdir()
    return stored.rename(folder / fingerprint(config))


def plan_digest(uri: str, config: JobConfig) -> str:
    split = Index.load(uri).split("train")
    return PackedBatchSampler.of_training(split, config).plan(0).digest()


def data_problem(prepared: Path, folder: Path) -> str:
    """What `status --deep` says of the prepared data of a run."""
    DataPointers(prepared_uri=str(prepared), features_uri="", features="off").write(LocalStorage(folder / "run"))
    return next(check.problem for check in check_files(str(folder / "run")) if check.part == "prepared data")


def test_it_is_refused_and_the_command_in_the_error_converts_it(config: JobConfig, old: Path, tmp_path: Path) -> None:
    lines, before = pq.read_table(old / LINES).to_pylist(), prepared_files(str(old))
    for use in (lambda: Index.load(str(old)), lambda: run_prepare(config)):
        with pytest.raises(OtherFormatError) as refused:
            use()
        assert refused.value.code == ExitCode.DATA and "is of format 13" in refused.value.found
    assert prepared_files(str(old)) == before
    for said in (PreparedImages(str(old)).embedded_image("train", "sample-1", 0).problem, data_problem(old, tmp_path)):
        assert "is of format 13" in said and refused.value.fix in said
    command = re.match(r"vlmpipe (data convert \S+)", refused.value.fix)
    assert command
    done = CliRunner().invoke(app, command[1].split(), catch_exceptions=False)
    assert done.exit_code == 0 and f"converted, {COUNT} samples" in done.stdout
    after = prepared_files(str(old))
    assert after.keys() ^ before.keys() == {NAME, LINES}
    assert all(after[name] == before[name] for name in after.keys() & before.keys() - {DONE})
    assert index_rows(old) == [as_row(line) for line in lines]
    again = CliRunner().invoke(app, command[1].split(), catch_exceptions=False)
    assert again.exit_code == 0 and "of today's format already" in " ".join(again.stdout.split())
    assert run_prepare(config).reused
    assert plan_digest(str(old), config) == PLAN_DIGEST


def test_a_folder_without_prepared_data_is_refused_in_words(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError) as refused:
            convert(str(folder))
        assert refused.value.code == ExitCode.NOT_FOUND and str(folder) in refused.value.found
        assert "ROOT/prepared/" in refused.value.expected and refused.value.fix
    assert not list(tmp_path.iterdir())


def as_row(line: dict[str, Any]) -> dict[str, Any]:
    """A row of the index, of a line of the format before."""
    columns = {"offset": "image_offsets", "bytes": "image_bytes", "width": "image_widths", "height": "image_heights"}
    values = zip(*(line[column] for column in columns.values()), strict=True)
    images = [dict(zip(columns, of_image, strict=True)) for of_image in values]
    for image, sha256, tokens in zip(images, line["image_sha256"], line["image_token_counts"], strict=True):
        image |= {"sha256": bytes.fromhex(sha256), "tokens": tokens}
    names = ("id", "key", "split", "shard", "json_offset", "json_bytes", "image_tokens", "tokens", "label_tokens")
    content = {"images": images, "content": bytes.fromhex(line["content"])}
    return {name: line[name] for name in (*names, "turns", "slices")} | content


def test_what_is_converted_equals_what_is_prepared_now(config: JobConfig, old: Path, tmp_path: Path) -> None:
    now = run_prepare(
        config.model_copy(update={"run": config.run.model_copy(update={"root_uri": str(tmp_path / "now")})})
    )
    convert(str(old))
    assert prepared_files(str(old)).keys() == prepared_files(now.uri).keys()
    assert (old / NAME).read_bytes() == Path(now.uri, NAME).read_bytes()


class StoppedError(Exception):
    """The process ends here."""


@pytest.mark.parametrize("stopped", ["upload", "write", "delete"])
@pytest.mark.parametrize("done_before", [False, True])
def test_a_stopped_conversion_leaves_data_that_the_next_one_completes(
    old: Path, monkeypatch: pytest.MonkeyPatch, stopped: str, done_before: bool
) -> None:
    plain: Callable[..., Any] = getattr(LocalStorage, stopped)

    def stop(self: LocalStorage, *arguments: Any, **options: Any) -> None:
        if done_before:
            plain(self, *arguments, **options)
        raise StoppedError

    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(LocalStorage, stopped, stop)
        convert(str(old))
    is_new = (stopped, done_before) in {("write", True), ("delete", False), ("delete", True)}
    if is_new:
        assert len(Index.load(str(old)).split("train"))
    else:
        with pytest.raises(OtherFormatError):
            Index.load(str(old))
    convert(str(old))
    assert Manifest.read(LocalStorage(old)).format == FORMAT and not (old / LINES).exists()
    index, reader = Index.load(str(old)), ShardReader.open(open_prepared(str(old)))
    for split in (index.split("train"), index.split("eval")):
        for number, identity in enumerate(split.ids):
            assert reader.images(split.sample_location(number)) == [png(int(identity.removeprefix("sample-")))]


def test_a_bucket_is_converted_in_place(old: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    with FakeGcs(buckets=["bucket"]) as server:
        remote = GcsStorage("gs://bucket/prepared", client=server.client(), retry=QUICK_RETRY)
        for name, data in prepared_files(str(old)).items():
            remote.write(name, data)
        monkeypatch.setattr(module, "open_storage", lambda _: remote)
        server.requests.clear()
        made = convert(remote.root_uri)
        assert made.samples == COUNT
        assert not [request for request in server.requests if ".tar" in request or ".png" in request], (
            "no image is read"
        )
        names = {info.name for info in remote.list()}
        assert NAME in names and LINES not in names
        assert Manifest.read(remote).files[NAME].bytes == made.index_bytes


@pytest.mark.parametrize("is_missing", [False, True])
def test_damaged_lines_are_not_converted_and_the_remedy_makes_room_for_new_data(
    config: JobConfig, old: Path, is_missing: bool
) -> None:
    damaged = bytearray((old / LINES).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (old / LINES).write_bytes(damaged)
    if is_missing:
        (old / LINES).unlink()
    with pytest.raises(DataError, match=r"index\.parquet is damaged") as refused:
        convert(str(old))
    assert not (old / NAME).exists() and find_prepared(config) == str(old)
    remedy = re.search(r"delete (\S+/DONE), and the next run prepares the data again", refused.value.fix)
    assert remedy
    Path(remedy[1]).unlink()
    with pytest.raises(UserError, match="not prepared yet"):  # as the step that prepares sees it
        find_prepared(config)


def test_earlier_formats_are_not_converted(old: Path) -> None:
    manifest = Manifest.read(LocalStorage(old), file_format=13)
    (old / DONE).write_bytes(Manifest(12, manifest.fingerprint, manifest.counts, manifest.files).to_bytes())
    with pytest.raises(OtherFormatError, match="is of format 12") as refused:
        convert(str(old))
    assert "data convert" not in refused.value.fix


def test_a_folder_with_a_space_in_its_name_is_one_argument_of_the_command() -> None:
    command = OtherFormatError("/data/my runs/set", 13).fix.partition(" makes")[0]
    assert shlex.split(command) == ["vlmpipe", "data", "convert", "/data/my runs/set"]


def test_data_of_the_format_before_is_not_compared_and_said_so(config: JobConfig, old: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(old, tmp_path / "kept")
    convert(str(old))
    run_prepare(config)  # records it as the last of this name
    shutil.rmtree(old)
    copy.rename(old)
    source = Path(str(config.data.source))
    write_json(
        source,
        [record(number, id=f"renamed-{number}" if number == 3 else f"sample-{number}") for number in range(COUNT)],
    )
    made = run_prepare(config)
    assert made.changes is None and f"no comparison with the data before: the prepared data in {old}" in made.notes
