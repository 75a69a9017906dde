"""Samples as the JSON records of other trainers.

LLaVA's and WebDataset's records keep the texts of the shards. In the others a line end beside an `<image>` mark is left
out, as in our native chat templates: trainers that replace the mark in place then make the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.chat.messages import Message, Role, as_chat, messages_of
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.errors import ConfigError

ROLES: frozenset[Role] = frozenset({"system", "user", "assistant"})
LLAVA_ROLES = {"system": "system", "user": "human", "assistant": "gpt"}
# Of a data set in LLaMA-Factory's dataset_info.json and in NeMo's meta file.
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredSample:
    """A sample as the shards hold it. Images are encoded."""

    id: str
    key: str  # its name in a WebDataset
    turns: tuple[Turn, ...]
    images: tuple[bytes, ...]
    image_names: tuple[str, ...]  # unique by content, with the suffix of the encoding

    @property
    def rejected(self) -> str:
        """The rejected answer of a pair; empty where the data is no pairs."""
        return self.turns[-1].rejected


def as_stored(sample: StoredSample) -> list[Record]:
    """Messages of a role and a text, each text as in the shards."""
    return _flagged(messages_of(sample.turns, IMAGE_TOKEN))


def messages_record(sample: StoredSample, paths: Sequence[str]) -> Record:
    """`messages` and `images`; of a pair also `rejected_response`."""
    rejected = {"rejected_response": sample.rejected} if sample.rejected else {}
    return {"id": sample.id, "messages": _marked(sample), **_tools(sample), "images": list(paths), **rejected}


def llava_record(sample: StoredSample, paths: Sequence[str]) -> Record:
    """`conversations` of `from` and `value`; `image` is one path, or a list of several."""
    require_no_tools(sample, "llava")
    spoken = [
        {"from": LLAVA_ROLES[message.pop("role")], "value": message.pop("content"), **message}
        for message in as_stored(sample)
    ]
    image = {"image": paths[0] if len(paths) == 1 else list(paths)} if paths else {}
    return {"id": sample.id, **image, "conversations": spoken} | _rejected(sample)


def trl_record(sample: StoredSample, paths: Sequence[str]) -> Record:
    """`messages` of typed parts; a pair as `prompt`, `chosen` and `rejected`."""
    _require_all_learned(sample, "trl")
    messages = as_chat(messages_of(sample.turns))
    images = {**_tools(sample), "images": list(paths)}
    if not sample.rejected:
        return {"id": sample.id, "messages": messages, **images}
    rejected = as_chat([Message("assistant", (sample.rejected,))])
    return {"id": sample.id, "prompt": messages[:-1], "chosen": messages[-1:], "rejected": rejected, **images}


def llama_factory_record(sample: StoredSample, paths: Sequence[str]) -> Record:
    """ShareGPT with OpenAI's keys; a pair as `messages`, `chosen` and `rejected`."""
    require_no_tools(sample, "llama-factory")
    _require_no_thinking(sample, "llama-factory")
    _require_all_learned(sample, "llama-factory")
    messages, images = _marked(sample), {"images": list(paths)}
    if not sample.rejected:
        return {"id": sample.id, "messages": messages, **images}
    rejected = {"role": "assistant", "content": sample.rejected}
    return {"id": sample.id, "messages": messages[:-1], "chosen": messages[-1], "rejected": rejected, **images}


def nemo_record(sample: StoredSample, paths: Sequence[str]) -> Record:
    """Return a LLaMA-Factory record. Refuses parts other than questions and answers, which NeMo silently drops."""
    require_no_tools(sample, "nemo")
    _require_no_thinking(sample, "nemo")
    _require_all_learned(sample, "nemo")
    for part, what in ((sample.rejected, "a rejected answer"), (sample.turns[0].system, "a system text")):
        if part:
            raise _lacking("nemo", sample, what)
    return llama_factory_record(sample, paths)


def webdataset_record(sample: StoredSample) -> Record:
    """The member that ends in .json."""
    return {"id": sample.id, "messages": as_stored(sample)} | _tools(sample) | _rejected(sample)


def llama_factory_index(names: Sequence[str], folder: Path, *, pairs: bool) -> tuple[str, Record]:
    """The index file and its content, for files of these names."""
    columns = {"messages": "messages", "images": "images"}
    columns |= {"chosen": "chosen", "rejected": "rejected"} if pairs else {}
    described = {
        "formatting": "sharegpt",
        "ranking": pairs,
        "columns": columns,
        "tags": TAGS | {"system_tag": "system"},
    }
    return "dataset_info.json", {Path(name).stem: {"file_name": name, **described} for name in names}


def nemo_index(names: Sequence[str], folder: Path, *, pairs: bool) -> tuple[str, Record]:
    """Return name and content of NeMo's index. NeMo reads image paths relative to `folder`, its final address."""
    described = {"columns": {"messages": "messages", "images": "images"}, "tags": TAGS, "media_dir": str(folder)}
    return "meta.json", {Path(name).stem: {"file_name": name, **described} for name in names}


Build = Callable[[StoredSample, Sequence[str]], Record]


def _marked(sample: StoredSample) -> list[Record]:
    """Messages of a role and a text, with a mark in place of each image and no line end beside it."""
    return _flagged(
        [
            replace(message, content=("".join(IMAGE_TOKEN if part is None else part for part in message.content),))
            for message in messages_of(sample.turns)
        ]
    )


def _flagged(messages: Sequence[Message]) -> list[Record]:
    """Messages of a role and a text, with ms-swift's `loss: false` at answers that are no labels."""
    chat = zip(as_chat(messages, ROLES), messages, strict=True)
    return [{**content, **({"loss": False} if message.is_context else {})} for content, message in chat]


def _rejected(sample: StoredSample) -> Record:
    return {"rejected": sample.rejected} if sample.rejected else {}


def _tools(sample: StoredSample) -> Record:
    return {"tools": json.loads(sample.turns[0].tools)} if sample.turns[0].tools else {}


def require_no_tools(sample: StoredSample, data_format: str) -> None:
    """Raise ConfigError for a sample with tools or calls of them, which few formats keep."""
    if any(turn.has_tools for turn in sample.turns):
        raise _lacking(data_format, sample, "tools and calls of them", "messages, trl or webdataset")


def _require_no_thinking(sample: StoredSample, data_format: str) -> None:
    if any(turn.thinking for turn in sample.turns):
        raise _lacking(data_format, sample, "an answer with thinking")


def _require_all_learned(sample: StoredSample, data_format: str) -> None:
    if any(turn.is_context for turn in sample.turns):
        raise _lacking(data_format, sample, "an answer that is not learned", "messages or llava")


def _lacking(data_format: str, sample: StoredSample, what: str, others: str = "messages or trl") -> ConfigError:
    return ConfigError(
        f"the format {data_format} has no place for {what}, which sample {sample.id!r} has",
        expected="a format that keeps all that was prepared",
        fix=f"choose the format {others}",
    )
