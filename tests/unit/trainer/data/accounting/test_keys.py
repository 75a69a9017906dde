"""Nothing of a record is dropped without a word: each key is read, known to change nothing, listed, or refused."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.data.prepared import conversation, encode, picture, png
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.sources.data_source import Columns
from vlmpipe.trainer.data.accounting.coverage import EARLY, Coverage, Coverages, share
from vlmpipe.trainer.data.accounting.keys import HARMLESS, LABEL_KEYS, Record, media_of
from vlmpipe.trainer.data.conversations.records import SHAPES, turns_of
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import Sample, Turn, Unread
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.errors import DataError, ExitCode

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=20), st.binary(max_size=4),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)  # fmt: skip
NAMES = st.one_of(st.text(max_size=12), st.sampled_from(["img", "video_path", "label", "url", "weight", "width"]))
EMPTY: tuple[Any, ...] = (None, "", [], {})


@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_every_key_is_read_or_harmless_or_unread(more: dict[str, Any]) -> None:
    known = {"conversations": conversation("Why?", "So.")}
    record = Record({**more, **known})
    turns_of(record, 0, "", tuple(SHAPES))
    read = set(record.used)
    try:
        unread = {one.name for one in record.unread(has_media=False)}
    except RejectedError as error:
        assert error.code == RejectCode.CONV_LABELS and LABEL_KEYS.keys() & more.keys()
        return
    for name, value in more.items():
        is_empty = value in EMPTY or (isinstance(value, dict) and not any(value.values()))
        assert name in read | unread | HARMLESS | LABEL_KEYS.keys() or is_empty, name


@given(NAMES, st.sampled_from([b"\xff\xd8", {"bytes": b"x", "path": None}, [{"bytes": b"x"}], "a/b.jpg", "b.avif",
                               "https://e.org/a.png?x=1", "data:image/png;base64,AA==", ["a.mp4"],
                               b64encode(png(1)).decode(),
                               [b64encode(encode(picture(), "JPEG")).decode()]]))  # fmt: skip
def test_media_are_seen_by_their_value_under_any_name(name: str, value: Any) -> None:
    assert media_of(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_width", 3),
        ("answer_2", "It ends in .jpg"),
        ("image_caption", "a cat on a mat"),
        ("file", "a.py"),
        ("code", "R0lGODtest"),
        ("path", "/9j/4AAQ/photo"),
    ],
)
def test_other_values_are_not_media(name: str, value: Any) -> None:
    assert not media_of(name, value)


def test_an_address_beside_an_image_says_where_it_is_from() -> None:
    record = Record({"url": "https://e.org/1.jpg", "image_url": "https://e.org/1", "depth": "1.png", "note": "x"})
    with_image = {key.name: key.media for key in record.unread(has_media=True)}
    assert (with_image["url"], with_image["image_url"], with_image["note"]) == ("", "", "")
    assert with_image["depth"] == "a name that ends in .png"
    assert {key.name: key.media for key in record.unread(has_media=False)}["url"] == "an address"


@pytest.mark.parametrize("content", [{"weight": 0}, {"loss": False}, {"tools": [{}, {"name": "x"}]}, {"loss_scale": 2}])
def test_what_changes_labels_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(RejectedError, match="changes what is learned") as refused:
        Record(content).unread(has_media=True)
    assert refused.value.code == RejectCode.CONV_LABELS
    assert Record({"weight": 1, "loss": True, "tools": [], "loss_scale": 1.0}).unread(has_media=True) == ()


@pytest.mark.parametrize("content", [{"mask": 1}, {"mask": 0}, {"mask": 1.0}, {"masked": False}])
def test_a_mask_of_a_message_is_refused_whichever_way_it_is_meant(content: dict[str, Any]) -> None:
    answer = {"from": "gpt", "value": "So.", **content}
    with pytest.raises(RejectedError, match="changes what is learned; write weight"):
        turns_of(Record({"conversations": [{"from": "human", "value": "Why?"}, answer]}), 0, "", tuple(SHAPES))


def test_columns_are_read_under_their_names_and_others_are_not() -> None:
    columns = Columns.model_validate({"image": "photo", "question": "q", "answer": "a", "ignored": ["mask"]})
    record = Record.of(
        {"photo": "1.png", "q": "Why?", "a": "So.", "messages": [{}], "mask": b"x", "images": []}, columns
    )
    assert turns_of(record, 1, "", tuple(SHAPES)) == (Turn("<image>\nWhy?", "So."),)
    assert record["image"] == ["1.png"]
    assert record.unread(has_media=True) == (Unread("messages", ""),)


def sample(*unread: Unread) -> Sample:
    return Sample("1", (Turn("q", "a"),), (), "line 1", unread=unread)


def test_the_refusal_names_key_share_and_mapping() -> None:
    coverage = Coverage()
    for number in range(200):
        coverage.add(sample(*([Unread("photo", "bytes")] if number else []), Unread("lens", "")))
    with pytest.raises(DataError) as refused:
        coverage.check("set.jsonl")
    text = refused.value.text()
    assert "photo in 199 of 200 samples (99%): bytes" in text and "lens" not in text
    assert "data.columns: {image: photo}" in text and "data.columns: {ignored: [photo]}" in text
    assert refused.value.code == ExitCode.DATA


def test_media_in_the_first_samples_end_the_reading_early() -> None:
    coverages, read = Coverages(DataConfig(source="a.jsonl", sequence_length=10)), 0
    with pytest.raises(DataError):
        for _ in coverages.counting(sample(Unread("photo", "bytes")) for _ in range(10 * EARLY)):
            read += 1
    assert read < EARLY


@example("\n")
@given(st.text(min_size=1, max_size=12))
def test_a_key_never_reaches_a_terminal_raw_and_its_printed_mapping_is_that_key(key: str) -> None:
    coverage = Coverage()
    unread = (Unread(f"img{key}", "its name"), Unread(key, ""))
    coverage.add(sample(*unread))
    with pytest.raises(DataError) as caught:
        coverage.check("d.json")
    said = coverage.described() + str(caught.value)
    assert all(char.isprintable() or char == "\n" for char in said)
    if "." not in key:
        to_read, to_ignore = (line.partition("data.columns: ")[2] for line in caught.value.fix.splitlines())
        assert yaml.safe_load(to_read) == {"image": f"img{key}"}
        assert yaml.safe_load(to_ignore) == {"ignored": [f"img{key}"]}


def test_both_printed_mappings_end_the_refusal(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(png())
    row = {"photo": "1.png", "question": "Why?", "answer": "So."}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")

    def images(**data: Any) -> int:
        config = DataConfig.model_validate({"source": str(tmp_path / "a.jsonl"), "sequence_length": 10} | data)
        coverages = Coverages(config)
        samples = list(coverages.counting(open_source(config)))
        coverages.check()
        return sum(len(one.images) for one in samples if isinstance(one, Sample))

    with pytest.raises(DataError, match="photo"):
        images()
    assert images(columns={"image": "photo"}) == 1
    assert images(columns={"ignored": ["photo"]}) == 0


def test_what_is_not_read_is_one_line() -> None:
    coverage = Coverage()
    for number in range(1000):
        coverage.add(sample(Unread("lens", ""), *([Unread("note", "")] if not number else [])))
    assert coverage.described() == "0 images, 1,000 samples without one; not read: lens (100%), note (below 1%)"
    assert (share(0, 5), share(999, 1000), share(5, 5)) == ("0%", "99%", "100%")


def absent(*keys: str) -> Sample:
    return sample(*(Unread(key, "", absent=True) for key in keys))


def test_a_record_tells_which_columns_it_has_no_value_for() -> None:
    columns = Columns.model_validate({"image": ["front", "back"], "answer": "labl"})
    record = Record.of({"front": "1.png", "labl": None, "question": "Why?", "answer": "So."}, columns)
    assert {key for key in record.unread(has_media=True) if key.absent} == {
        Unread("back", "", absent=True), Unread("labl", "", absent=True),
    }  # fmt: skip


def test_a_column_that_no_sample_has_is_refused_and_one_that_some_have_is_not() -> None:
    coverages = Coverages(DataConfig.model_validate({"source": "a.csv", "sequence_length": 9}))
    list(coverages.counting([absent("labl", "id2"), absent("labl")]))
    with pytest.raises(DataError) as refused:
        coverages.check()
    assert "data.columns names labl, and none of the 2 samples of a.csv has a value there" in refused.value.text()
    assert coverages.as_json() == {"source": {"samples": 2, "unread": {}}}


def test_sources_that_share_columns_may_each_have_some() -> None:
    def checked(**lacking: str) -> None:
        sources = [{"name": name, "uri": f"{name}.csv"} for name in ("one", "two")]
        data = {"sources": sources, "columns": {"answer": "label", "id": "key"}, "sequence_length": 9}
        coverages = Coverages(DataConfig.model_validate(data))
        made = [replace(absent(key), where=f"{name}: 1") for name, key in lacking.items()]
        list(coverages.counting(made))
        coverages.check()

    checked(one="label", two="key")
    with pytest.raises(DataError, match=r"names label, and none of the 2 samples of one\.csv, two\.csv has"):
        checked(one="label", two="label")
