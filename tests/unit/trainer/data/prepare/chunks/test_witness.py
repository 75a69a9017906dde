"""Whatever byte of the input changes at whatever moment: the change is in the result's name, or it is an error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.data.chunks import fixed_tokenizer
from tests.support.data.prepared import job_config, llava_folder, png, prepared_files, run_prepare
from tests.support.short_form import chosen
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.prepare import pipeline
from vlmpipe.trainer.data.prepare.chunks import chunk as chunk_module
from vlmpipe.trainer.data.prepare.chunks.witness import Witness
from vlmpipe.trainer.data.prepare.fingerprint import fingerprint
from vlmpipe.trainer.data.prepare.validation.final_ids import Entry
from vlmpipe.trainer.data.prepare.validation.validate_sample import Accepted
from vlmpipe.trainer.data.rejects import Reject, RejectCode
from vlmpipe.trainer.data.sample import ImageRef, Sample, Turn
from vlmpipe.trainer.errors import DataError, UserError

COUNT = 12
MOMENTS = {"after the fingerprint": "make_plan", "after the plan": "build_chunk", "before the end": "merge"}


def llava(folder: Path) -> dict[str, Any]:
    images, records = llava_folder(folder, COUNT)
    (folder / "set.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"source": str(folder / "set.jsonl"), "image_folder": str(images)}


def parquet_of_names(folder: Path) -> dict[str, Any]:
    llava_folder(folder, COUNT)
    rows = [{"image": {"bytes": None, "path": f"images/{n}.png"}, "caption": f"Number {n}."} for n in range(COUNT)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "set.parquet")
    return {"source": str(folder / "set.parquet")}


SOURCES: dict[str, Callable[[Path], dict[str, Any]]] = {"llava": llava, "parquet": parquet_of_names}


def config_of(folder: Path, source: str, *, small: bool) -> JobConfig:
    """In one piece, or in chunks that are stored."""
    folder.mkdir(exist_ok=True)
    tokenizer = fixed_tokenizer(folder / "tokenizer")
    chunks = {} if small else {"chunk_samples": 4, "workers": 1}
    return job_config(folder / "root", tokenizer=tokenizer, **SOURCES[source](folder), **chunks)


def mutated(path: Path) -> tuple[bytes, os.stat_result]:
    """Change the file to another of the same length and times. Returns what it was."""
    before, stat = path.read_bytes(), path.stat()
    if path.suffix == ".png":
        after = next(data for seed in range(100, 999) if len(data := png(seed)) <= len(before))
        after += bytes(len(before) - len(after))
    else:
        after = before.replace(b"A picture.", b"A pixture.")
    assert len(after) == len(before) and after != before
    path.write_bytes(after)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return before, stat


FILES = (
    ("llava", "set.jsonl", True),
    ("llava", "images/3.png", True),
    ("llava", "images/3.png", False),
    ("parquet", "images/3.png", False),
)
CHANGES = {f"{moment}, {file}": (moment, *file) for moment in MOMENTS for file in FILES}
# Each file and each moment.
SHORT = {f"{[*MOMENTS][number % len(MOMENTS)]}, {file}" for number, file in enumerate(FILES)}


@pytest.mark.parametrize(("moment", "source", "name", "small"), chosen(CHANGES, SHORT.__contains__).values())
def test_a_change_while_data_is_prepared_is_named_and_is_in_no_later_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, source: str, name: str, small: bool
) -> None:
    pristine = config_of(tmp_path / "pristine", source, small=small)
    config = config_of(tmp_path / "set", source, small=small)
    path = tmp_path / "set" / name
    function, was = MOMENTS[moment], list[tuple[bytes, os.stat_result]]()
    original = getattr(pipeline, function)

    def after_a_change(*arguments: Any, **options: Any) -> Any:
        if not was:
            was.append(mutated(path))
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        for module in (pipeline, chunk_module):
            patch.setattr(module, function, after_a_change, raising=module is pipeline)
        with pytest.raises(DataError, match="changed while it was prepared"):
            run_prepare(config)
    changed = run_prepare(config)
    path.write_bytes(was[0][0])
    again, expected = run_prepare(config), run_prepare(pristine)
    assert again.uri != changed.uri and not again.reused
    images = {file: data for file, data in prepared_files(again.uri).items() if file.endswith(".tar")}
    assert images == {file: data for file, data in prepared_files(expected.uri).items() if file.endswith(".tar")}


@pytest.mark.parametrize(
    ("source", "name"), [("llava", "set.jsonl"), ("llava", "images/3.png"), ("parquet", "images/3.png")]
)
def test_a_change_between_runs_is_seen_though_size_and_time_are_as_before(
    tmp_path: Path, source: str, name: str
) -> None:
    config = config_of(tmp_path / "set", source, small=True)
    first = run_prepare(config)
    assert run_prepare(config).reused
    mutated(tmp_path / "set" / name)
    assert run_prepare(config).uri != first.uri


def test_every_file_of_a_tokenizer_is_in_the_fingerprint(tmp_path: Path) -> None:
    config = config_of(tmp_path / "set", "llava", small=True)
    folder = tmp_path / "set" / "tokenizer"
    found = {fingerprint(config)}
    for number, name in enumerate(("tokenizer.model", "merges.txt", "vocab.tiktoken", "tokenizer_config.json"), 2):
        path = folder / name
        path.write_bytes(path.read_bytes() + b"\n" if path.exists() else b"x")
        found.add(fingerprint(config))
        assert len(found) == number
    (folder / "model.safetensors").write_bytes(b"weights")
    assert fingerprint(config) in found


def test_an_image_that_goes_while_data_is_prepared_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path / "set", "llava", small=True)
    original = pipeline.build_chunk

    def after_a_loss(*arguments: Any, **options: Any) -> Any:
        (tmp_path / "set" / "images" / "3.png").unlink(missing_ok=True)
        return original(*arguments, **options)

    monkeypatch.setattr(pipeline, "build_chunk", after_a_loss)
    with pytest.raises(UserError, match="changed while it was prepared"):
        run_prepare(config)


def test_a_digest_is_of_the_bytes_that_were_decoded() -> None:
    """And not of those that the file has a moment later."""
    decoded = list[bytes]()

    def validate(entry: Entry | Reject) -> Accepted | Reject:
        assert isinstance(entry, Entry)
        decoded.extend(image.read() for image in entry.sample.images)
        return Reject("line 1", "one", RejectCode.TEXT_EMPTY, "")

    def entry_of(*bytes_by_reading: bytes) -> Entry:
        left = iter(bytes_by_reading)
        sample = Sample("one", (Turn("what?", "that"),), (ImageRef("a.png", lambda: next(left)),), "line 1")
        return Entry(sample, (), "train")

    witness = Witness(validate)  # type: ignore[arg-type]  # of a validator, its call alone is needed
    digests = [witness(entry_of(*data))[1] for data in ((b"first", b"later"), (b"first",), (b"later",))]
    assert decoded == [b"first", b"first", b"later"]
    assert digests[0] == digests[1] != digests[2]
