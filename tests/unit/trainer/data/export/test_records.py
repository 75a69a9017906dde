"""Records keep thinking and several images, or say that they cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vlmpipe.trainer.data.export import records
from vlmpipe.trainer.data.export.records import StoredSample
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.errors import ConfigError

TURNS = (Turn("<image>\nWhich of <image> is it?", "7", thinking="It has a bar."), Turn("Sure?", "Yes."))
SAMPLE = StoredSample("s", "s", TURNS, (b"1", b"2"), ("1.png", "2.png"))


def test_thinking_stays_with_its_answer() -> None:
    paths = ["media/1.png", "media/2.png"]
    for record in (records.messages_record(SAMPLE, paths), records.trl_record(SAMPLE, paths)):
        assert [message.get("reasoning_content") for message in record["messages"]] == [
            None,
            "It has a bar.",
            None,
            None,
        ]
    spoken = records.llava_record(SAMPLE, paths)["conversations"]
    assert spoken[1] == {"from": "gpt", "value": "7", "reasoning_content": "It has a bar."}


@pytest.mark.parametrize("build", [records.llama_factory_record, records.nemo_record])
def test_a_format_without_thinking_says_so(build: records.Build) -> None:
    with pytest.raises(ConfigError, match="no place for an answer with thinking, which sample 's' has"):
        build(SAMPLE, [])


UNLEARNED = replace(SAMPLE, turns=(replace(TURNS[0], is_context=True, thinking=""), TURNS[1]))


def test_an_answer_that_is_no_label_says_so_where_our_reader_reads_it() -> None:
    written = [
        records.messages_record(UNLEARNED, [])["messages"],
        records.llava_record(UNLEARNED, [])["conversations"],
        records.webdataset_record(UNLEARNED)["messages"],
    ]
    assert [[message.get("loss") for message in messages] for messages in written] == 3 * [[None, False, None, None]]


@pytest.mark.parametrize("build", [records.llama_factory_record, records.nemo_record, records.trl_record])
def test_a_format_without_loss_flags_says_so(build: records.Build) -> None:
    with pytest.raises(ConfigError, match="no place for an answer that is not learned") as refused:
        build(UNLEARNED, [])
    assert refused.value.fix == "choose the format messages or llava"


def test_marks_are_one_for_each_image_in_text_and_in_parts() -> None:
    assert records.messages_record(SAMPLE, [])["messages"][0]["content"] == "<image>Which of <image> is it?"
    assert records.as_stored(SAMPLE)[0]["content"] == TURNS[0].question
    parts = records.trl_record(SAMPLE, [])["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image", "text", "image", "text"]
