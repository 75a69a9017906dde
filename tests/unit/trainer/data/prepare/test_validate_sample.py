"""Samples in a published chat template: what is stored, what is rejected, and what identifies the data."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.data.prepared import (
    conversation,
    encode,
    job_config,
    llava_folder,
    picture,
    record,
    run_prepare,
    write_json,
)
from tests.support.trainer.chat_templates import PLAIN, TEMPLATES, WITH_TOOLS, with_template
from tests.support.trainer.tiny_native import model_section
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.chat.encode import IGNORED, Chat
from vlmpipe.trainer.data.chat.layout import ChatTemplate
from vlmpipe.trainer.data.chat.make import make_chat
from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.data.prepare.chunks.witness import digest_of
from vlmpipe.trainer.data.prepare.pipeline import fingerprint
from vlmpipe.trainer.data.prepare.validate_sample import Accepted, Entry, SampleValidator
from vlmpipe.trainer.data.rejects import Reject, RejectCode, Repair
from vlmpipe.trainer.data.sample import Box, ImageRef, Sample, Turn
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.image_tokens import SQUARES
from vlmpipe.trainer.storage import open_storage

ASCII = [chr(code) for code in range(32, 127)] + ["\n"]
SYSTEM = {"from": "system", "value": "Be brief."}
GOOD = [
    record(0, split="train"),
    record(1, conversations=[SYSTEM, *conversation("<image>\nWhat?", "A picture.")], split="train"),
    record(2, conversations=conversation("Show it.", "Here: <image>\nand there."), split="eval"),
]
THOUGHT = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "Yes.", "thinking": "Hm."}]
BAD = {
    "text.special_token": record(3, conversations=conversation("<image> <|end|>", "Yes.")),
    "conv.template": record(4, conversations=THOUGHT),
}


def config_of(folder: Path, template: str = PLAIN, **data: Any) -> JobConfig:
    images, _ = llava_folder(folder, 5)
    with_template(template.replace("<|image_pad|>", "<image>"), image="<image>").save_pretrained(folder / "tokenizer")
    source = write_json(folder / "data.json", [*GOOD, *BAD.values()])
    settings = {"source": str(source), "image_folder": str(images), "max_reject_fraction": 0.5} | data
    return job_config(folder / "root", tokenizer=str(folder / "tokenizer"), chat_template="native", **settings)


def test_what_training_reads_is_what_was_proved(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    prepared = run_prepare(config)
    storage = open_storage(prepared.uri)
    rejects = [json.loads(line)["code"] for line in storage.read("rejects.jsonl").splitlines()]
    assert rejects == list(BAD)
    chat, split = Chat.load(storage, SQUARES), Index.load(prepared.uri).split("train")
    reader = ShardReader.open(storage)
    assert [reader.turns(split.sample_location(1))[0].system, chat.template.source] == [
        "Be brief.", PLAIN.replace("<|image_pad|>", "<image>")
    ]  # fmt: skip
    sampler = PackedBatchSampler(split, config.data, seed=0, global_batch_size=1)
    sequence = PackedLoader(split, sampler, chat, reader).pack_sequence([0, 1])
    labels = chat.tokenizer.decode(sequence.labels[sequence.labels != IGNORED])
    assert labels == "A picture.<|end|>Number 0.<|end|>A picture.<|end|>"
    text = chat.tokenizer.decode(sequence.input_ids[: sequence.tokens])
    assert text.count("<|turn|>system\nBe brief.<|end|>\n<|turn|>user\n<|vision_start|><image>") == 1
    assert sequence.label_tokens == split.label_tokens.sum()


def test_training_reads_which_answers_are_learned(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    said = conversation("<image>\nWhat?", "A wrong one.", "Sure?", "No, a cat.")
    flagged = [record(0, conversations=[said[0], {**said[1], "loss": False}, *said[2:]], split="train")]
    write_json(tmp_path / "data.json", [*flagged, *GOOD[1:]])
    prepared = run_prepare(config)
    storage = open_storage(prepared.uri)
    chat, split = Chat.load(storage, SQUARES), Index.load(prepared.uri).split("train")
    sampler = PackedBatchSampler(split, config.data, seed=0, global_batch_size=1)
    sequence = PackedLoader(split, sampler, chat, ShardReader.open(storage)).pack_sequence([0])
    assert chat.tokenizer.decode(sequence.labels[sequence.labels != IGNORED]) == "No, a cat.<|end|>"
    assert "A wrong one.<|end|>" in chat.tokenizer.decode(sequence.input_ids[: sequence.tokens])
    assert sequence.label_tokens == split.label_tokens[0] == (sequence.labels != IGNORED).sum()
    slices = json.loads(storage.read("stats.json"))["slices"]
    assert slices["all"]["train_questions"] == 2, "context is no answer that a baseline may give"


def test_training_reads_calls_of_tools_as_the_template_writes_them(tmp_path: Path) -> None:
    config = config_of(tmp_path, WITH_TOOLS)
    tools = [{"type": "function", "function": {"name": "zoom"}}]
    asked, answered = conversation("<image>\nWhat?", "A cat.")
    called = {"from": "gpt", "value": "", "tool_calls": [{"function": {"name": "zoom", "arguments": {"by": 2}}}]}
    said = [asked, called, {"from": "tool", "value": "A bigger image."}, answered]
    write_json(tmp_path / "data.json", [record(0, conversations=said, tools=tools, split="train"), *GOOD[1:]])
    prepared = run_prepare(config)
    storage = open_storage(prepared.uri)
    chat, split = Chat.load(storage, SQUARES, is_proved=True), Index.load(prepared.uri).split("train")
    sampler = PackedBatchSampler(split, config.data, seed=0, global_batch_size=1)
    sequence = PackedLoader(split, sampler, chat, ShardReader.open(storage)).pack_sequence([0])
    labels = chat.tokenizer.decode(sequence.labels[sequence.labels != IGNORED])
    assert labels == '<call>zoom {"by": 2}</call><|end|>A cat.<|end|>'
    text = chat.tokenizer.decode(sequence.input_ids[: sequence.tokens])
    assert text.startswith('<|turn|>tools\n{"type": "function", "function": {"name": "zoom"}}\n<|end|>')
    assert "<|turn|>tool\nA bigger image.<|end|>" in text


def test_tools_that_the_template_leaves_out_reject_the_record(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    tools = [{"type": "function", "function": {"name": "zoom"}}]
    write_json(tmp_path / "data.json", [record(0, tools=tools), *GOOD[1:]])
    storage = open_storage(run_prepare(config).uri)
    (reject,) = map(json.loads, storage.read("rejects.jsonl").splitlines())
    assert reject["code"] == "conv.template" and "leaves out the tool 'zoom'" in reject["message"]


def test_another_template_is_other_data(tmp_path: Path) -> None:
    """A cached step must not take data that was written in another format."""
    config = config_of(tmp_path)
    before = fingerprint(config)
    with_template(TEMPLATES["strips"].replace("<|image_pad|>", "<image>"), image="<image>").save_pretrained(
        tmp_path / "tokenizer"
    )
    other = config.model_copy(update={"data": config.data.model_copy(update={"chat_template": "vlmpipe"})})
    assert len({before, fingerprint(config), fingerprint(other)}) == 3


def reading(folder: Path, policy: str, length: int) -> SampleValidator:
    with_template(PLAIN.replace("<|image_pad|>", "<image>"), image="<image>").save_pretrained(folder / "tokenizer")
    settings: dict[str, Any] = {"overlong_policy": policy, "sequence_length": length, "source": "x"}
    config = job_config(folder, tokenizer=str(folder / "tokenizer"), chat_template="native", **settings)
    return SampleValidator(config, make_chat(config.model, config.data, ()))


def talk(words: list[int]) -> Entry:
    turns = tuple(Turn("word " * asked, "word " * (1 + asked % 3)) for asked in words)
    turns = tuple(replace(turn, question=f"Why {turn.question}?", answer=turn.answer.strip()) for turn in turns)
    return Entry(Sample("one", turns, (), "line 1"), (), "train")


@pytest.fixture(scope="module")
def truncating(tmp_path_factory: pytest.TempPathFactory) -> SampleValidator:
    return reading(tmp_path_factory.mktemp("chat"), "truncate", 120)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20))
def test_as_many_turns_are_kept_as_fit(truncating: SampleValidator, words: list[int]) -> None:
    entry = talk(words)
    result, turns = truncating(entry), entry.sample.turns
    fitting = [n for n in range(1, len(turns) + 1) if len(truncating._encoded(turns[:n], [], []).input_ids) <= 120]
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
    fits = [len(splitting._encoded((turn,), [], []).input_ids) <= 120 for turn in turns]
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
    whole = len(reading(tmp_path, "reject", 4000)._encoded(entry.sample.turns, [], []).input_ids)
    result = reading(tmp_path, "truncate", whole - beyond)(entry)
    assert isinstance(result, Accepted) and len(result.turns) == 5 - beyond


def test_a_mark_of_objects_in_a_rejected_answer_is_refused(tmp_path: Path) -> None:
    entry = talk([1])
    validator = reading(tmp_path, "reject", 400)
    validator._in_pairs = True
    turns = (replace(entry.sample.turns[0], rejected="<bbox> maybe"),)
    result = validator(replace(entry, sample=replace(entry.sample, turns=turns)))
    assert isinstance(result, Reject) and result.code == RejectCode.CONV_OBJECTS


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=12))
def test_turns_are_kept_up_to_an_answer_that_is_learned(
    truncating: SampleValidator, words: list[tuple[int, bool]]
) -> None:
    entry = talk([count for count, _ in words])
    turns = [replace(turn, is_context=is_so) for turn, (_, is_so) in zip(entry.sample.turns, words, strict=True)]
    result = truncating(replace(entry, sample=replace(entry.sample, turns=tuple(turns))))
    fitting = [n for n in range(1, len(turns) + 1) if len(truncating._encoded(turns[:n], [], []).input_ids) <= 120]
    learned = [n for n in fitting if not turns[n - 1].is_context]
    if not learned:
        nothing = all(turn.is_context for turn in turns)
        assert isinstance(result, Reject)
        assert result.code == (RejectCode.CONV_LABELS if nothing else RejectCode.CONV_TOO_LONG)
        return
    assert isinstance(result, Accepted) and result.encoded.label_tokens
    assert len(result.turns) == (len(turns) if max(fitting) == len(turns) else max(learned))


def test_the_answer_that_a_pair_is_about_must_be_learned(tmp_path: Path) -> None:
    entry = talk([1, 2])
    validator = reading(tmp_path, "reject", 400)
    validator._in_pairs = True
    first, last = (replace(turn, rejected="No.") for turn in entry.sample.turns)
    for turns, accepted in (((first, last), True), ((first, replace(last, is_context=True)), False)):
        result = validator(replace(entry, sample=replace(entry.sample, turns=turns)))
        assert isinstance(result, Accepted) == accepted
        assert isinstance(result, Accepted) or result.code == RejectCode.PAIR_INCOMPLETE


@pytest.mark.parametrize(("family", "answer"), [("qwen2_5_vl", [16, 8, 32, 32]), ("qwen3_vl", [500, 250, 1000, 1000])])
def test_boxes_are_stored_as_the_family_writes_them(tmp_path: Path, family: str, answer: list[int]) -> None:
    data = {"sequence_length": 300, "chat_template": "vlmpipe", "source": "x"}
    job = job_config(tmp_path, **data)
    job = job.model_copy(
        update={"model": ModelConfig.model_validate(model_section(family, min_pixels=1024, max_pixels=1024))}
    )
    turns = (Turn("<image>\nWhere is it?", "At <bbox>."), Turn("And?", "Gone."))
    image = ImageRef("i.png", lambda: encode(picture(1, 64)))
    boxes = (Box((32.0, 16.0, 64.0, 64.0), 0, False),)
    sample = Sample("one", turns, (image,), "line 1", boxes=boxes)
    validator = SampleValidator(job, make_chat(job.model, job.data, ["At [0123456789], "]))
    result = validator(Entry(sample, (), "train"))
    assert isinstance(result, Accepted), result
    assert [turn.answer for turn in result.turns] == [f"At {answer}.", "Gone."]
    moved = replace(sample, boxes=(replace(boxes[0], corners=(0.0, 0.0, 64.0, 64.0)),))
    assert len({digest_of(Entry(one, (), "train"), lambda image: image.name) for one in (sample, moved)}) == 2
    assert sample.content_digest() != moved.content_digest()


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


def test_tokens_that_the_run_file_allows_are_text_and_none_that_end_turns(tmp_path: Path) -> None:
    tokenizer = with_template(PLAIN.replace("<|image_pad|>", "<image>"), image="<image>")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<ref>", "</ref>"]}, replace_extra_special_tokens=False)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    settings: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer"), "chat_template": "native", "source": "x"}
    boxed = Entry(Sample("one", (Turn("Where?", "<ref>a cat</ref>"),), (), "line 1"), (), "train")

    def result(*allowed: str) -> Accepted | Reject:
        config = job_config(tmp_path, allowed_tokens=allowed, **settings)
        return SampleValidator(config, make_chat(config.model, config.data, ()))(boxed)

    refused, accepted = result(), result("<ref>", "</ref>")
    assert isinstance(refused, Reject) and refused.code == RejectCode.TEXT_SPECIAL_TOKEN
    assert isinstance(accepted, Accepted) and accepted.encoded.label_tokens
    for token in ("<|end|>", "<image>", "<box>"):
        with pytest.raises(ConfigError, match=f"data.allowed_tokens has '{re.escape(token)}'"):
            result(token)


def test_texts_without_tokens_are_rejected_and_lost_characters_counted(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "<end>": 1, **{c: n for n, c in enumerate(ASCII, 2)}}, "<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<end>")
    tokenizer.save_pretrained(tmp_path)
    config = job_config(tmp_path, tokenizer=str(tmp_path), chat_template="vlmpipe", source="x")
    validator = SampleValidator(config, make_chat(config.model, config.data, ()))
    known, partly, none = (
        validator(Entry(Sample("one", (Turn("What?", answer),), (), "line 1"), (), "train"))
        for answer in ("A cat.", "A \u732b.", "\u732b")
    )
    assert isinstance(known, Accepted) and not known.repairs
    assert isinstance(partly, Accepted) and partly.repairs == (Repair.CHARACTERS_LOST,)
    assert isinstance(none, Reject) and none.code == RejectCode.TEXT_NO_TOKENS and "\u732b" in none.message
