"""Preparation of several sources as one: each keeps its chunks, and its name is on all that comes of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.data.chunks import CHUNK, fixed_tokenizer
from tests.support.data.index import index_rows
from tests.support.data.prepared import conversation, job_config, llava_folder, record, run_prepare
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.prepare.pipeline import ChunkCounts
from vlmpipe.trainer.data.sample import Box, ImageRef, Sample, Turn, Unread
from vlmpipe.trainer.data.sources.base import SeveralSources, Source
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.storage import open_storage


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Pictures, other records about the same pictures, and text alone."""
    images, records = llava_folder(tmp_path, 30)
    again = [record(number, conversations=conversation("<image>\nHow many?", f"{number}.")) for number in range(25)]
    text = [{"id": f"t{n}", "slice": "sums", "conversations": conversation(f"{n} + 1?", f"{n + 1}")} for n in range(20)]
    found = {}
    for name, lines in (("pictures", records), ("again", again), ("text", text)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        folder = {} if name == "text" else {"image_folder": str(images)}
        found[name] = {"name": name, "uri": str(tmp_path / f"{name}.jsonl"), **folder}
    return found


def config_of(tmp_path: Path, *sources: dict[str, Any], **data: Any) -> JobConfig:
    tokenizer = fixed_tokenizer(tmp_path / "tokenizer")
    return job_config(tmp_path / "root", tokenizer=tokenizer, sources=sources, chunk_samples=CHUNK, workers=1, **data)


def test_a_new_source_prepares_itself_alone(tmp_path: Path, sources: dict[str, dict[str, Any]]) -> None:
    before = run_prepare(config_of(tmp_path, sources["pictures"], sources["again"]))
    assert before.chunks and before.chunks.prepared == before.chunks.total > 4
    text = run_prepare(config_of(tmp_path, sources["text"]))
    assert text.chunks
    after = run_prepare(config_of(tmp_path, sources["text"], sources["pictures"], sources["again"]))
    assert after.chunks == ChunkCounts(before.chunks.total + text.chunks.total, 0), "all were there"
    weighted = [source | {"weight": 1.0} for source in (sources["text"], sources["pictures"], sources["again"])]
    assert run_prepare(config_of(tmp_path, *weighted)).reused, "shares do not change the data"


def test_samples_carry_their_sources_name(tmp_path: Path, sources: dict[str, dict[str, Any]]) -> None:
    prepared = run_prepare(config_of(tmp_path, sources["pictures"] | {"max_samples": 12}, *list(sources.values())[1:]))
    storage = open_storage(prepared.uri)
    index = index_rows(prepared.uri)
    assert {line["id"].partition("/")[0]: line["slices"][0] for line in index} == {
        "pictures": "pictures", "again": "again", "text": "text/sums",
    }  # fmt: skip
    stats = json.loads(storage.read("stats.json"))["sources"]
    assert {name: sum(one["samples"] for one in splits.values()) for name, splits in stats.items()} == {
        "pictures": 12, "again": 25, "text": 20,
    }  # fmt: skip
    assert stats["text"]["train"]["images"] == 0 < stats["text"]["train"]["tokens"]
    sides: dict[str, set[str]] = {}
    for line in index:
        for image in line["images"]:
            sides.setdefault(image["sha256"], set()).add(line["split"])
    assert all(len(splits) == 1 for splits in sides.values()), "a picture of two sources is in one split"


def test_a_source_without_samples_for_training_is_refused(tmp_path: Path, sources: dict[str, dict[str, Any]]) -> None:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text(json.dumps({"id": "x", "split": "eval", "conversations": conversation("Why?", "So.")}) + "\n")
    with pytest.raises(DataError, match=r"data\.sources: exam has no samples for training"):
        run_prepare(config_of(tmp_path, sources["text"], {"name": "exam", "uri": str(held_out)}))


class OneSample(Source):
    def __init__(self, sample: Sample) -> None:
        self.found = sample

    def fingerprint(self) -> str:
        return ""

    def __iter__(self) -> Iterator[Sample]:
        return iter([self.found])


def test_nothing_else_of_a_sample_changes() -> None:
    turn = Turn(
        "q", "a", "sums", "system", "thinking", "rejected", True, (0.0, 0.1, 0.2, 0.3), "tools", "calls", ("result",),
        (("camera", "left"),),
    )  # fmt: skip
    sample = Sample(
        "one", (turn, Turn("q", "a")), (ImageRef("i", bytes),), "line 1", "eval", "group", (Unread("url", ""),), True,
        (Box((1.0, 2.0), 0, False),),
    )  # fmt: skip
    for made in (turn, sample):
        unset = [field.name for field in dataclasses.fields(made) if getattr(made, field.name) == field.default]
        assert unset == [], "a new field needs a value here"
    (named,) = SeveralSources({"mine": OneSample(sample)}, {"mine": 0})
    turns = (dataclasses.replace(turn, slice="mine/sums"), dataclasses.replace(sample.turns[1], slice="mine"))
    assert named == dataclasses.replace(sample, id="mine/one", where="mine: line 1", turns=turns)
