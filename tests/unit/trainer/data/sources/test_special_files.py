"""Special files and large images in sources: sentences for the source, rejects for a picture."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.data.formats import FORMATS, captioned, write_source
from tests.support.data.prepared import job_config, llava_folder, png, run_prepare, write_json
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.rejects import Reject, RejectCode, RejectedError
from vlmpipe.trainer.data.sample import Sample
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.errors import DataError, ExitCode, UserError

SPECIAL: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a loop of symbolic links": lambda path: path.symlink_to(path.name),
    "a character device": lambda path: path.symlink_to("/dev/zero"),
}


def config(source: Path | str, max_image_bytes: int = 1 << 20) -> DataConfig:
    return DataConfig(source=str(source), sequence_length=100, max_image_bytes=max_image_bytes)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".tar", ".parquet", ".csv"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_file_as_a_source_is_reported(tmp_path: Path, kind: str, suffix: str) -> None:
    SPECIAL[kind](tmp_path / f"set{suffix}")
    with pytest.raises(DataError, match=f"data.source .* is {kind}, not a regular file"):
        open_source(config(tmp_path / f"set{suffix}"))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("suffix", [".tar", ".parquet"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_file_among_source_files_is_reported(tmp_path: Path, kind: str, suffix: str) -> None:
    name = {".tar": "webdataset", ".parquet": "parquet"}[suffix]
    write_source(name, tmp_path, captioned(4))
    SPECIAL[kind](tmp_path / f"z{suffix}")
    with pytest.raises(DataError, match=f"z{suffix} is {kind}"):
        list(open_source(config(tmp_path)))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_unrelated_loop_of_links_is_ignored(tmp_path: Path, name: str) -> None:
    source = write_source(name, tmp_path, captioned(4))
    (tmp_path / "loop").symlink_to("loop")
    assert len(list(open_source(config(source)))) == 4


@pytest.mark.parametrize("name", ["webdataset", "parquet", "llava-json", "llava-lines", "coco"])
def test_files_of_a_source_may_be_links_out_of_its_folder(tmp_path: Path, name: str) -> None:
    write_source(name, tmp_path / "blobs", captioned(4))
    (tmp_path / "set").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        if path.suffix != ".png":
            (tmp_path / "set" / path.name).symlink_to(path)
    (link, *_) = sorted((tmp_path / "set").iterdir())
    assert len(list(open_source(config(link)))) == (4 if link.suffix in (".json", ".jsonl") else 2)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["a FIFO", "a loop of symbolic links"])
def test_a_special_picture_is_one_reject(tmp_path: Path, kind: str) -> None:
    images, records = llava_folder(tmp_path, 20)
    (images / "3.png").unlink()
    SPECIAL[kind](images / "3.png")
    source = write_json(tmp_path / "a.json", records)
    job = job_config(tmp_path / "root", source=str(source), image_folder=str(images), max_reject_fraction=0.5)
    prepared = run_prepare(job)
    assert prepared.counts["rejected"] == 1
    (line,) = Path(prepared.uri, "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["code"] == "ref.missing" and kind in json.loads(line)["message"]


@pytest.mark.timeout(20)
def test_fifo_in_a_tokenizer_folder_is_reported(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 3)
    (tmp_path / "tokenizer").mkdir()
    os.mkfifo(tmp_path / "tokenizer" / "tokenizer.json")
    source = write_json(tmp_path / "a.json", records)
    job = job_config(
        tmp_path / "root", source=str(source), image_folder=str(images), tokenizer=str(tmp_path / "tokenizer")
    )
    with pytest.raises(UserError, match=r"tokenizer\.json is a FIFO") as caught:
        run_prepare(job)
    assert caught.value.code == ExitCode.DATA


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_an_image_is_read_up_to_the_bound_in_every_format(tmp_path: Path, name: str) -> None:
    samples = captioned(4)
    largest_bytes = max(len(sample.image) for sample in samples)
    samples[2] = replace(samples[2], image=samples[2].image.ljust(largest_bytes + 1, b"\0"))
    source = write_source(name, tmp_path, samples)
    codes = [_code_of(found) for found in open_source(config(source, largest_bytes))]
    assert codes == [None, None, RejectCode.IMAGE_TOO_LARGE, None]


def _code_of(found: Sample | Reject) -> RejectCode | None:
    if isinstance(found, Reject):
        return found.code
    try:
        found.images[0].read()
    except RejectedError as error:
        return error.code
    return None


def test_an_image_of_a_tar_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (("a.png", png() + bytes(1 << 21)), ("a.txt", b"A caption.")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    (sample,) = open_source(config(tmp_path / "a.tar"))
    assert isinstance(sample, Sample)
    monkeypatch.setattr("vlmpipe.trainer.data.sources.webdataset.read_member", None)
    with pytest.raises(RejectedError, match=r"bytes, more than data\.max_image_bytes 1048576"):
        sample.images[0].read()
    assert sample.image_bytes() > 1 << 21
