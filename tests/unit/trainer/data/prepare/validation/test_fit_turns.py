"""Turns are kept, dropped and divided so that samples fit into a packed sequence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.data.chat_records import GOOD, SYSTEM, config_of, reading, talk
from tests.support.data.prepared import (
    conversation,
    job_config,
    record,
    run_prepare,
    write_json,
)
from tests.support.trainer.chat_templates import WITH_TOOLS, with_template
from vlmpipe.trainer.data.chat.layout import ChatTemplate
from vlmpipe.trainer.data.chat.run_chat import make_chat
from vlmpipe.trainer.data.prepare.validation.final_ids import Entry
from vlmpipe.trainer.data.prepare.validation.validate_sample import Accepted, SampleValidator
from vlmpipe.trainer.data.rejects import Reject, RejectCode, Repair
from vlmpipe.trainer.data.sample import Sample, Turn
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.storage import open_storage


@pytest.fixture(scope="module")
def truncating(tmp_path_factory: pytest.TempPathFactory) -> SampleValidator:
    return reading(tmp_path_factory.mktemp("chat"), "truncate", 120)


def fitting_turns(validator: SampleValidator, turns: Sequence[Turn]) -> list[int]:
    """Numbers of first turns that fit into 120 tokens."""
    encoded = validator._fitter.encoded
    return [n for n in range(1, len(turns) + 1) if len(encoded(tuple(turns[:n]), [], []).input_ids) <= 120]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20))
def test_as_many_turns_are_kept_as_fit(truncating: SampleValidator, words: list[int]) -> None:
    entry = talk(words)
    result, turns = truncating(entry), entry.sample.turns
    fitting = [
        n for n in range(1, len(turns) + 1) if len(truncating._fitter.encoded(turns[:n], [], []).input_ids) <= 120
    ]
    if not fitting:
        assert isinstance(result, Reject) and result.code == RejectCode.CONV_TOO_LONG
        return
    assert isinstance(result, Accepted) and len(result.turns) == max(fitting)
    assert result.repairs.count(Repair.TURNS_DROPPED) == len(turns) - max(fitting)


@pytest.fixture(scope="module")
def splitting(tmp_path_factory: pytest.TempPathFactory) -> SampleValidator:
    return reading(tmp_path_factory.mktemp("chat"), "split", 120)


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=20))
def test_a_long_conversation_is_divided_into_samples_without_loss(
    splitting: SampleValidator, words: list[tuple[int, bool]]
) -> None:
    entry = talk([count for count, _ in words])
    turns = tuple(replace(turn, is_context=is_so) for turn, (_, is_so) in zip(entry.sample.turns, words, strict=True))
    fits = [len(splitting._fitter.encoded((turn,), [], []).input_ids) <= 120 for turn in turns]
    result = splitting(replace(entry, sample=replace(entry.sample, turns=turns)))
    learnable = [turn for turn, is_short in zip(turns, fits, strict=True) if is_short and not turn.is_context]
    if not learnable:
        assert isinstance(result, Reject) and result.code in (RejectCode.CONV_TOO_LONG, RejectCode.CONV_LABELS)
        return
    assert isinstance(result, Accepted)
    kept = [turn for sample in result.samples for turn in sample.turns]
    assert [turn for turn in kept if not turn.is_context] == learnable
    assert all(len(one.encoded.input_ids) <= 120 and one.encoded.label_tokens for one in result.samples)
    assert len({one.id for one in result.samples}) == len(result.samples) and result.id == "one"
    assert result.repairs.count(Repair.TURNS_SPLIT) == len(result.rest)
    assert result.repairs.count(Repair.TURNS_DROPPED) == len(turns) - len(kept)


def test_further_samples_show_the_images_and_the_system_text_of_the_turns_before(tmp_path: Path) -> None:
    config = config_of(tmp_path, overlong_policy="split", sequence_length=160, max_images_per_sequence=4)
    asked = [("<image>\nFirst?", "One."), ("Why " * 12 + "?", "So."), ("<image> Second?", "Two."), ("So?", "Yes " * 9)]
    said = conversation(*(words for pair in asked for words in pair))
    long = record(0, image=["0.png", "1.png"], conversations=[SYSTEM, *said], split="train")
    write_json(tmp_path / "data.json", [long, *GOOD[1:]])
    prepared = run_prepare(config)
    assert (prepared.counts["read"], prepared.counts["accepted"]) == (3, 3)
    split, reader = Index.load(prepared.uri).split("train"), ShardReader.open(open_storage(prepared.uri))
    found = {
        identity: (reader.turns(split.sample_location(n)), reader.images(split.sample_location(n)))
        for n, identity in enumerate(split.ids)
    }
    pieces = {name: value for name, value in found.items() if name.startswith("sample-0")}
    assert len(pieces) > 1, "the fixture's conversation must be too long"
    assert [turn.answer for turns, _ in pieces.values() for turn in turns] == [
        "One.",
        "So.",
        "Two.",
        ("Yes " * 9).strip(),
    ]
    for turns, images in pieces.values():
        assert turns[0].system == "Be brief." and turns[0].question.startswith("<image>")
        assert sum(turn.question.count("<image>") for turn in turns) == len(images)
    (*_, (last, images)) = pieces.values()
    assert len(images) == 2 and last[0].question.count("<image>") >= 1
    repairs = json.loads(open_storage(prepared.uri).read("rejects_summary.json"))["repairs"]
    assert repairs["turns_split"] == 1 and "turns_dropped" not in repairs


def test_independent_turns_are_the_samples_of_records_with_one_question_each(tmp_path: Path) -> None:
    """The same tokens, labels and images, so that they share a prefix as those do."""
    marks, images = "<image>\n<image>\n", {"image": ["0.png", "1.png"], "split": "train"}
    unlearned = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So.", "loss": False}]
    first, third, last = (conversation(*words) for words in ((f"{marks}1?", "One."), ("3?", "Yes."), ("4?", "No.")))
    whole = record(0, conversations=[SYSTEM, *first, *unlearned, *third, *last], **images)
    with_marks = [{**said[0], "value": marks + said[0]["value"]} for said in (unlearned, last)]
    single = [
        record(0, conversations=[SYSTEM, *first], **images),
        record(0, id="sample-0~turn-2", conversations=[SYSTEM, with_marks[0], unlearned[1], *third], **images),
        record(0, id="sample-0~turn-4", conversations=[SYSTEM, with_marks[1], last[1]], **images),
    ]
    config = config_of(tmp_path, turns="independent", share_prefix="on")
    write_json(tmp_path / "data.json", [whole, *GOOD[1:]])
    independent = run_prepare(config)
    write_json(tmp_path / "data.json", [*single, *GOOD[1:]])
    records = run_prepare(config.model_copy(update={"data": config.data.model_copy(update={"turns": "conversation"})}))
    assert independent.uri != records.uri
    split, expected = (Index.load(prepared.uri).split("train") for prepared in (independent, records))
    assert list(split.ids) == list(expected.ids) == ["sample-0", "sample-0~turn-2", "sample-0~turn-4", "sample-1"]
    for name in ("tokens", "label_tokens", "prefix_tokens", "prefix_keys"):
        assert (getattr(split, name) == getattr(expected, name)).all(), name
    assert len({key.tobytes() for key in split.prefix_keys[:3]}) == 1 and split.prefix_tokens[0]
    repairs = json.loads(open_storage(independent.uri).read("rejects_summary.json"))["repairs"]
    assert not {"turns_split", "turns_dropped"} & repairs.keys()


@pytest.mark.parametrize("policy", ["reject", "truncate", "split"])
def test_a_turn_that_does_not_fit_is_left_out_or_rejects_its_record(tmp_path: Path, policy: str) -> None:
    config = config_of(tmp_path, turns="independent", overlong_policy=policy, sequence_length=60)
    said = conversation("<image>\nFirst?", "One.", "Second?", "No " * 60, "Third?", "Two.")
    write_json(tmp_path / "data.json", [record(0, conversations=said, split="train"), *GOOD[1:]])
    prepared = run_prepare(config)
    ids = list(Index.load(prepared.uri).split("train").ids)
    kept = ["sample-0", "sample-0~turn-3", "sample-1"]
    assert ids == (["sample-1"] if policy == "reject" else kept)
    summary = json.loads(open_storage(prepared.uri).read("rejects_summary.json"))
    assert summary["repairs"].get("turns_dropped", 0) == (policy != "reject")
    assert summary["rejected"] == (policy == "reject")


def test_no_further_sample_begins_with_the_result_of_a_call(tmp_path: Path) -> None:
    with_template(WITH_TOOLS.replace("<|image_pad|>", "<image>"), image="<image>").save_pretrained(tmp_path)
    config = job_config(
        tmp_path, tokenizer=str(tmp_path), chat_template="native", source="x", overlong_policy="split",
        sequence_length=150,
    )  # fmt: skip
    validator = SampleValidator(config, make_chat(config.model, config.data, ()))
    call = json.dumps([{"type": "function", "function": {"name": "look", "arguments": {}}}])
    called = (Turn("Where is it?", "", calls=call), Turn("", "Over there.", results=("there " * 4,)))
    result = validator(Entry(Sample("one", called * 6, (), "line 1"), (), "train"))
    assert isinstance(result, Accepted) and len(result.rest) > 1
    assert all(not one.turns[0].results and not one.turns[-1].calls for one in result.samples)
    assert sum(len(one.turns) for one in result.samples) == 12


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_last_answer_that_fits_without_what_is_written_behind_it_is_dropped(tmp_path: Path, beyond: int) -> None:
    entry = talk([4, 4, 4, 4, 4])
    whole = len(reading(tmp_path, "reject", 4000)._fitter.encoded(entry.sample.turns, [], []).input_ids)
    result = reading(tmp_path, "truncate", whole - beyond)(entry)
    assert isinstance(result, Accepted) and len(result.turns) == 5 - beyond


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=12))
def test_turns_are_kept_up_to_an_answer_that_is_learned(
    truncating: SampleValidator, words: list[tuple[int, bool]]
) -> None:
    entry = talk([count for count, _ in words])
    turns = [replace(turn, is_context=is_so) for turn, (_, is_so) in zip(entry.sample.turns, words, strict=True)]
    result = truncating(replace(entry, sample=replace(entry.sample, turns=tuple(turns))))
    fitting = [
        n for n in range(1, len(turns) + 1) if len(truncating._fitter.encoded(turns[:n], [], []).input_ids) <= 120
    ]
    learned = [n for n in fitting if not turns[n - 1].is_context]
    if not learned:
        nothing = all(turn.is_context for turn in turns)
        assert isinstance(result, Reject)
        assert result.code == (RejectCode.CONV_LABELS if nothing else RejectCode.CONV_TOO_LONG)
        return
    assert isinstance(result, Accepted) and result.encoded.label_tokens
    assert len(result.turns) == (len(turns) if max(fitting) == len(turns) else max(learned))


@pytest.mark.parametrize("policy", ["truncating", "splitting"])
def test_work_grows_with_the_turns_and_not_with_their_square(
    policy: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renderings and tokenized characters of a record of many turns, counted instead of timed."""
    validator: SampleValidator = request.getfixturevalue(policy)
    render, work = ChatTemplate.render, []

    def counted(self: ChatTemplate, chat: list[Any], **options: Any) -> str:
        work.append(len(chat))
        return render(self, chat, **options)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    rendered = {}
    for turns in (100, 400):
        work.clear()
        assert isinstance(validator(talk([turns % 7] * turns)), Accepted)
        rendered[turns] = sum(work)
    assert rendered[400] < 5 * rendered[100] and rendered[400] < 12 * 2 * 400


@pytest.mark.parametrize(("policy", "is_kept"), [("reject", False), ("truncate", True)])
def test_texts_that_cannot_fit_are_not_tokenized(tmp_path: Path, policy: str, is_kept: bool) -> None:
    validator = reading(tmp_path, policy, 100)
    huge = Turn("Why?", "x" * 10_000_000)
    for turns, accepted in (((huge,), False), ((Turn("Why?", "So."), huge), is_kept)):
        with mock.patch.object(validator._chat, "encode", side_effect=validator._chat.encode) as encode:
            result = validator(Entry(Sample("one", turns, (), "line 1"), (), "train"))
        assert isinstance(result, Accepted) == accepted and encode.call_count == accepted
        if isinstance(result, Reject):
            assert result.code == RejectCode.CONV_TOO_LONG and "10,000," in result.message
