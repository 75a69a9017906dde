"""Records of conversations, and validators of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.data.prepared import (
    conversation,
    job_config,
    llava_folder,
    record,
    write_json,
)
from tests.support.trainer.chat_templates import PLAIN, with_template
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.run_chat import make_chat
from vlmpipe.trainer.data.prepare.validation.final_ids import Entry
from vlmpipe.trainer.data.prepare.validation.validate_sample import SampleValidator
from vlmpipe.trainer.data.sample import Sample, Turn

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


def reading(folder: Path, policy: str, length: int) -> SampleValidator:
    with_template(PLAIN.replace("<|image_pad|>", "<image>"), image="<image>").save_pretrained(folder / "tokenizer")
    settings: dict[str, Any] = {"overlong_policy": policy, "sequence_length": length, "source": "x"}
    config = job_config(folder, tokenizer=str(folder / "tokenizer"), chat_template="native", **settings)
    return SampleValidator(config, make_chat(config.model, config.data, ()))


def talk(words: list[int]) -> Entry:
    turns = tuple(Turn("word " * asked, "word " * (1 + asked % 3)) for asked in words)
    turns = tuple(replace(turn, question=f"Why {turn.question}?", answer=turn.answer.strip()) for turn in turns)
    return Entry(Sample("one", turns, (), "line 1"), (), "train")
