"""Which samples share a split: by picture unless asked otherwise, whatever the source, the order and the file names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.data.formats import FORMATS, captioned, write_source
from tests.support.data.index import index_rows
from tests.support.data.prepared import conversation, job_config, llava_folder, png, record, run_prepare, write_json
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.prepare.chunks.plan import read_plan, write_plan
from vlmpipe.trainer.data.prepare.split_groups import SampleGroups
from vlmpipe.trainer.data.sample import ImageRef, Sample, Split, Turn
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.errors import DataError

RECORDS = st.lists(st.lists(st.integers(0, 30), max_size=3), min_size=1, max_size=40)  # pictures of each record


def stats_of(uri: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(uri, "stats.json").read_text(encoding="utf-8"))
    return found


def question_each(pictures: int = 12, questions: int = 6) -> list[dict[str, Any]]:
    """One record a question, which is how VQA data mostly comes."""
    return [
        record(n, id=f"{n}-{k}", conversations=conversation(f"<image>\nQuestion {k}?", f"Answer {k}."))
        for k in range(questions)
        for n in range(pictures)
    ]


def splits_of(folder: Path, records: Sequence[Sequence[int]], split_by: str = "image") -> list[Split]:
    """The planned split of each record."""
    samples = [
        Sample(
            str(number),
            (Turn("what?", "this"),),
            tuple(ImageRef(f"{number}/{image}.png", lambda image=image: bytes([image])) for image in images),  # type: ignore[misc]
            "",
        )
        for number, images in enumerate(records)
    ]
    config = DataConfig(
        source="unused.json",
        sequence_length=8,
        split_by=split_by,
        validation_fraction=0.4,
        chunk_samples=8,
        max_image_bytes=99,
    )
    for _ in write_plan(samples, folder, config, threads=2):
        pass
    return [split for chunk in read_plan(folder) for split in chunk.splits()]


@given(records=RECORDS)
def test_no_picture_is_in_both_splits(records: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    splits = splits_of(tmp_path_factory.mktemp("plan"), records)
    held_out, trained = (
        {image for images, split in zip(records, splits, strict=True) if split == name for image in images}
        for name in ("eval", "train")
    )
    assert not held_out & trained


@given(records=RECORDS, data=st.data())
def test_the_order_of_records_does_not_matter(
    records: list[list[int]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pictured = [images for images in records if images]
    order = data.draw(st.permutations(range(len(pictured))))
    if not pictured:
        return
    first = splits_of(tmp_path_factory.mktemp("plan"), pictured)
    again = splits_of(tmp_path_factory.mktemp("plan"), [pictured[place] for place in order])
    assert again == [first[place] for place in order]


def test_a_picture_of_its_own_keeps_its_split_when_records_are_added(tmp_path: Path) -> None:
    for name in ("few", "many"):
        (tmp_path / name).mkdir()
    few = splits_of(tmp_path / "few", [[n] for n in range(20)])
    many = splits_of(tmp_path / "many", [[n] for n in range(200)])
    assert many[:20] == few
    assert 40 < many.count("eval") < 120


@pytest.mark.parametrize("chunk_samples", [16, 16_384])
def test_questions_about_one_picture_stay_together(tmp_path: Path, chunk_samples: int) -> None:
    images, _ = llava_folder(tmp_path, 12)
    (images / "copy.png").write_bytes(png(0))  # the same picture under another name
    records = [*question_each(), record(0, id="copy", image="copy.png")]
    settings = {"source": str(write_json(tmp_path / "a.json", records)), "image_folder": str(images)}
    prepared = run_prepare(job_config(tmp_path / "root", chunk_samples=chunk_samples, **settings))
    stats = stats_of(prepared.uri)
    assert stats["eval_images_also_in_train"] == 0
    assert (
        prepared.counts["eval"]
        and prepared.counts["train"]
        and sum(prepared.counts[name] for name in ("eval", "train")) == len(records)
    )
    by_record = run_prepare(job_config(tmp_path / "root", split_by="record", **settings))
    assert stats_of(by_record.uri)["eval_images_also_in_train"] > 0


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_is_split_by_picture(tmp_path: Path, name: str) -> None:
    once = captioned(20)
    twice = [replace(sample, name=f"{sample.name}-again", caption=f"Again {sample.caption}") for sample in once]
    folder = tmp_path / "source"
    folder.mkdir()
    source = write_source(name, folder, [*once, *twice])
    prepared = run_prepare(job_config(tmp_path / "root", source=source))
    stats = stats_of(prepared.uri)
    assert stats["splits"]["eval"]["unique_images"] * 2 == prepared.counts["eval"] > 0
    assert stats["splits"]["train"]["unique_images"] * 2 == prepared.counts["train"] > 0
    assert stats["eval_images_also_in_train"] == 0


def test_an_image_has_the_same_split_in_every_format(tmp_path: Path) -> None:
    held_out = []
    for name in sorted(FORMATS):
        (tmp_path / name).mkdir()
        source = write_source(name, tmp_path / name, captioned(20))
        rows = index_rows(run_prepare(job_config(tmp_path / f"{name}-root", source=source)).uri)
        hashes = [[image["sha256"] for image in row["images"]] for row in rows if row["split"] == "eval"]
        held_out.append(set(map(str, hashes)))
    assert held_out[0] and all(images == held_out[0] for images in held_out)


def test_a_field_keeps_its_records_together(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 40)
    records = [line | {"patient": f"p{n // 5}"} for n, line in enumerate(records)]
    settings = {"source": str(write_json(tmp_path / "a.json", records)), "image_folder": str(images)}
    prepared = run_prepare(job_config(tmp_path / "root", split_by="patient", validation_fraction=0.4, **settings))
    index = Index.load(prepared.uri)
    held_out, trained = (
        {int(identity.removeprefix("sample-")) // 5 for identity in index.split(name).ids} for name in ("eval", "train")
    )
    assert held_out and trained and not held_out & trained


def test_a_record_without_the_field_is_a_reject(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 10)
    settings = {"source": str(write_json(tmp_path / "a.json", records)), "image_folder": str(images)}
    with pytest.raises(DataError, match="'patient' is nothing \\(null\\), not a text or a whole number"):
        run_prepare(job_config(tmp_path / "root", split_by="patient", **settings))


def test_split_that_images_make_impossible_is_reported(tmp_path: Path) -> None:
    images, _ = llava_folder(tmp_path, 10)
    chain = [record(n, image=[f"{n}.png", f"{(n + 1) % 10}.png"]) for n in range(10)]
    chain = [line | {"conversations": conversation("<image>\n<image>\nSame?", "No.")} for line in chain]
    settings = {"source": str(write_json(tmp_path / "a.json", chain)), "image_folder": str(images)}
    with pytest.raises(DataError, match="split by image") as raised:
        run_prepare(job_config(tmp_path / "root", **settings))
    assert "data.split_by: record" in str(raised.value)


def test_builtin_set_has_no_fields_to_split_by(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"names a field of records, which builtin:digits has none of"):
        job_config(tmp_path, source="builtin:digits", split_by="patient")


def split_by_images(samples: list[list[str]], **data: Any) -> tuple[list[str], list[str]]:
    """The splits of samples with these images, and the notes."""
    groups = SampleGroups(DataConfig.model_validate({"source": "x", "sequence_length": 1} | data))
    sets = [sorted(set(images)) for images in samples]
    for number, images in enumerate(sets, 1):
        groups.add(number, images)
    groups.join()
    splits = [groups.split_of(number, images[0]) for number, images in enumerate(sets, 1)]
    groups.check(lambda record: f"record {record}", lambda record: sets[record - 1][0])
    return splits, groups.notes(lambda record: f"record {record}")


def with_logo(count: int = 200, logos: int = 160) -> list[list[str]]:
    return [[f"{n}", "logo"] if n < logos else [f"{n}"] for n in range(count)]


def test_a_logo_joins_no_groups_and_is_named() -> None:
    splits, notes = split_by_images(with_logo(), validation_fraction=0.1)
    assert 5 <= splits.count("eval") <= 40
    assert notes == [
        "an image of record 1 is beside others in 160 of 200 samples and joins no groups (data.max_image_share)"
    ]


def test_a_split_that_one_picture_decides_is_refused_with_the_picture() -> None:
    with pytest.raises(DataError) as refused:
        split_by_images(with_logo(), validation_fraction=0.5, max_image_share=1.0)
    text = refused.value.text()
    assert "the largest group has 160 samples (80%), joined by an image of record 1, which 160 of them have" in text
    assert "data.max_split_error: 1" in text
    split_by_images(with_logo(), validation_fraction=0.5, max_image_share=1.0, max_split_error=1.0)


@given(st.lists(st.lists(st.sampled_from("abcdefghijklmnop"), min_size=1, max_size=4), min_size=1, max_size=60))
def test_samples_that_share_an_image_are_in_one_split_unless_it_is_named(samples: list[list[str]]) -> None:
    splits, notes = split_by_images(samples, max_split_error=1.0, validation_fraction=0.3, max_image_share=0.5)
    if notes:
        return
    sides: dict[str, set[str]] = {}
    for images, split in zip(samples, splits, strict=True):
        for image in images:
            sides.setdefault(image, set()).add(split)
    assert all(len(side) == 1 for side in sides.values())


def test_two_pictures_of_many_questions_stay_together() -> None:
    """They are all that their samples have, so they join these however common they are."""
    pairs = [[f"{n % 4}a", f"{n % 4}b"] for n in range(400)]
    splits, _ = split_by_images(pairs, validation_fraction=0.4)
    assert all(splits[n] == splits[n % 4] for n in range(400))
