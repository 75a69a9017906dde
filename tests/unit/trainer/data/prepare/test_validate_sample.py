"""Samples in a published chat template: what is stored, what is rejected, and what identifies the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.data.prepared import conversation, job_config, llava_folder, record, run_prepare, write_json
from tests.support.trainer.chat_templates import PLAIN, TEMPLATES, with_template
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.encode import IGNORED, Chat
from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.data.prepare.pipeline import fingerprint
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.models.image_tokens import SQUARES
from vlmpipe.trainer.storage import open_storage

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


def test_another_template_is_other_data(tmp_path: Path) -> None:
    """A cached step must not take data that was written in another format."""
    config = config_of(tmp_path)
    before = fingerprint(config)
    with_template(TEMPLATES["strips"].replace("<|image_pad|>", "<image>"), image="<image>").save_pretrained(
        tmp_path / "tokenizer"
    )
    other = config.model_copy(update={"data": config.data.model_copy(update={"chat_template": "vlmpipe"})})
    assert len({before, fingerprint(config), fingerprint(other)}) == 3
