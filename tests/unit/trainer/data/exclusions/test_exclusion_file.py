"""Samples that data.exclude leaves out, from the file of ids to the prepared data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.data.index import index_rows
from tests.support.data.prepared import (
    conversation,
    job_config,
    llava_folder,
    record,
    run_prepare,
    write_json,
)
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.exclusions.exclusion_file import Exclusions, exclusion_lines, read_exclusions
from vlmpipe.trainer.data.prepare.fingerprint import fingerprint
from vlmpipe.trainer.data.rejects import RejectCode
from vlmpipe.trainer.errors import ConfigError, DataError

SAMPLES = 20
LEFT_OUT = ("sample-3", "sample-7")


@given(ids=st.sets(st.text(st.characters(exclude_categories=["Cs"]), min_size=1)))
def test_written_ids_are_read_again(ids: set[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("list") / "a.jsonl"
    path.write_bytes(exclusion_lines((identity, "duplicate", "of another") for identity in sorted(ids)))
    assert read_exclusions(str(path)).ids == ids


def test_csv_and_numbers_are_ids_too(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('reason,id\ndull,a\n"wrong, they say","b"\n', encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"id": 17}\n\n{"id": "b"}\n', encoding="utf-8")
    assert read_exclusions(str(tmp_path / "a.csv")).ids == {"a", "b"}
    assert read_exclusions(str(tmp_path / "a.jsonl")).ids == {"17", "b"}


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.jsonl", '{"id": "a"}\nnot json\n', "line 2 is not JSON"),
        ("a.jsonl", '["a"]\n', "line 1 has no id"),
        ("a.jsonl", '{"id": ""}\n', "line 1 has no id"),
        ("a.csv", "name\na\n", "line 2 has no id"),
        ("missing.jsonl", "", "is no file"),
    ],
)
def test_another_file_is_refused_in_words(tmp_path: Path, name: str, text: str, why: str) -> None:
    if text:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=why):
        read_exclusions(str(tmp_path / name))


def test_ids_that_match_nothing_are_counted(tmp_path: Path) -> None:
    note = Exclusions("a.jsonl", frozenset({"a", "b\x1b", "c"})).note(frozenset({"a"}))
    assert note.startswith("data.exclude leaves out 1 samples of 3 ids; 2 match no sample (b")
    assert "\x1b" not in note
    assert Exclusions().note(frozenset()) == ""


def listed(tmp_path: Path, *ids: str) -> str:
    path = tmp_path / "exclusions.jsonl"
    path.write_bytes(exclusion_lines((identity, "duplicate", "") for identity in ids))
    return str(path)


def config_of(tmp_path: Path, exclude: str, **changes: object) -> JobConfig:
    images, records = llava_folder(tmp_path, SAMPLES)
    source = write_json(tmp_path / "a.json", records)
    return job_config(tmp_path / "root", source=str(source), image_folder=str(images), exclude=exclude, **changes)


@pytest.mark.parametrize("chunk_samples", [2, 16_384], ids=["chunks", "one chunk"])
def test_excluded_samples_are_in_the_ledger_and_not_in_the_data(tmp_path: Path, chunk_samples: int) -> None:
    exclude = listed(tmp_path, *LEFT_OUT, "nobody")
    config = config_of(tmp_path, exclude, chunk_samples=chunk_samples, max_reject_fraction=0.0)
    prepared = run_prepare(config)
    assert prepared.counts["accepted"] == SAMPLES - len(LEFT_OUT)
    assert (prepared.counts["read"], prepared.counts["rejected"]) == (SAMPLES, len(LEFT_OUT))
    rejects = [json.loads(line) for line in Path(prepared.uri, "rejects.jsonl").read_text("utf-8").splitlines()]
    assert [(line["id"], line["code"]) for line in rejects] == [(one, RejectCode.SAMPLE_EXCLUDED) for one in LEFT_OUT]
    assert {row["id"] for row in index_rows(prepared.uri)}.isdisjoint(LEFT_OUT)
    note = "data.exclude leaves out 2 samples of 3 ids; 1 match no sample (nobody)"
    assert (
        note in prepared.notes
        and note in json.loads(Path(prepared.uri, "stats.json").read_text("utf-8"))["coverage"]["notes"]
    )


def test_the_ids_decide_the_fingerprint_and_their_order_and_reasons_do_not(tmp_path: Path) -> None:
    excluding = config_of(tmp_path, listed(tmp_path, *LEFT_OUT))
    without = excluding.model_copy(update={"data": excluding.data.model_copy(update={"exclude": ""})})
    prints = {fingerprint(without), fingerprint(excluding)}
    assert len(prints) == 2
    listed(tmp_path, *reversed(LEFT_OUT))
    assert fingerprint(excluding) in prints
    listed(tmp_path, LEFT_OUT[0])
    assert fingerprint(excluding) not in prints


def test_a_list_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    everything = [f"sample-{number}" for number in range(SAMPLES)]
    with pytest.raises(DataError, match="leaves out all 20 samples"):
        run_prepare(config_of(tmp_path, listed(tmp_path, *everything)))


def test_an_excluded_record_joins_no_groups(tmp_path: Path) -> None:
    images, lines = llava_folder(tmp_path, SAMPLES)
    talk = conversation("<image>" * SAMPLES + " How many?", "Many.")
    lines.append(record(0, id="album", image=[f"{number}.png" for number in range(SAMPLES)], conversations=talk))
    source = write_json(tmp_path / "a.json", lines)
    settings = {"source": str(source), "image_folder": str(images), "sequence_length": 512}
    with pytest.raises(DataError, match="never separated"):
        run_prepare(job_config(tmp_path / "root", **settings))
    counts = run_prepare(job_config(tmp_path / "root", **settings, exclude=listed(tmp_path, "album"))).counts
    assert counts["train"] + counts["eval"] == SAMPLES
    assert counts["train"] and counts["eval"]


def test_a_line_of_countless_brackets_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        read_exclusions(str(tmp_path / "deep.jsonl"))
