"""Samples in a published chat template: what is stored, what is rejected, and what identifies the data."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.data.chat_records import BAD, GOOD, config_of, reading, talk
from tests.support.data.prepared import (
    conversation,
    encode,
    job_config,
    picture,
    record,
    run_prepare,
    write_json,
)
from tests.support.trainer.chat_templates import PLAIN, TEMPLATES, WITH_TOOLS, with_template
from tests.support.trainer.tiny_native import model_section
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.chat.encode import IGNORED, Chat
from vlmpipe.trainer.data.chat.run_chat import make_chat
from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.data.prepare.chunks.witness import digest_of
from vlmpipe.trainer.data.prepare.fingerprint import fingerprint
from vlmpipe.trainer.data.prepare.validation.final_ids import Entry
from vlmpipe.trainer.data.prepare.validation.validate_sample import Accepted, SampleValidator
from vlmpipe.trainer.data.rejects import Reject, RejectCode, Repair
from vlmpipe.trainer.data.sample import Box, ImageRef, Sample, Turn
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.image_tokens import SQUARES
from vlmpipe.trainer.storage import open_storage

ASCII = [chr(code) for code in range(32, 127)] + ["\n"]


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


def test_a_mark_of_objects_in_a_rejected_answer_is_refused(tmp_path: Path) -> None:
    entry = talk([1])
    validator = reading(tmp_path, "reject", 400)
    validator._in_pairs = validator._fitter._in_pairs = True
    turns = (replace(entry.sample.turns[0], rejected="<bbox> maybe"),)
    result = validator(replace(entry, sample=replace(entry.sample, turns=turns)))
    assert isinstance(result, Reject) and result.code == RejectCode.CONV_OBJECTS


def test_the_answer_that_a_pair_is_about_must_be_learned(tmp_path: Path) -> None:
    entry = talk([1, 2])
    validator = reading(tmp_path, "reject", 400)
    validator._in_pairs = validator._fitter._in_pairs = True
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
