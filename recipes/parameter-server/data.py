"""Micro-batches of Qwen2.5-VL from the samples that vlmpipe exports (`data_format: trl`)."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoImageProcessor, AutoTokenizer

NO_LABEL = -100


class Samples:
    """The training split, encoded when it is asked for."""

    def __init__(self, data: Path, model: Path) -> None:
        self._data = data
        self._samples = [json.loads(line) for line in (data / "train.jsonl").open(encoding="utf-8")]
        # Not AutoProcessor: its half for videos needs torchvision.
        self._tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        self._images = AutoImageProcessor.from_pretrained(model, trust_remote_code=False)
        self._image_id = json.loads((model / "config.json").read_text(encoding="utf-8"))["image_token_id"]
        self._encoded = functools.lru_cache(4096)(self._encode)

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, chosen: Iterable[int]) -> dict[str, torch.Tensor]:
        """The model's inputs, and `labels`, which are -100 outside of answers. All (samples, tokens) but the pixels."""
        ids, labels, pixels, grids = zip(*map(self._encoded, chosen), strict=True)
        padded = pad_sequence(ids, batch_first=True)
        return {
            "input_ids": padded,
            "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
            "mm_token_type_ids": (padded == self._image_id).int(),
            "labels": pad_sequence(labels, batch_first=True, padding_value=NO_LABEL),
            "pixel_values": torch.cat(pixels),
            "image_grid_thw": torch.cat(grids),
        }

    def _encode(self, number: int) -> tuple[torch.Tensor, ...]:
        """Ids, labels on answers and their end marks, pixels and their grid."""
        sample = self._samples[number]
        images = self._images([Image.open(self._data / name) for name in sample["images"]], return_tensors="pt")
        grids = images["image_grid_thw"]
        counts = (grids.prod(1) // self._images.merge_size**2).tolist()
        messages = sample["messages"]
        ids = self._tokens(messages, counts)
        labels = torch.full_like(ids, NO_LABEL)
        for turn in (number for number, message in enumerate(messages) if message["role"] == "assistant"):
            start = len(self._tokens(messages[:turn], counts, add_generation_prompt=True))
            end = len(self._tokens(messages[: turn + 1], counts, cut="\n"))
            labels[start:end] = ids[start:end]
        return ids, labels, images["pixel_values"], grids

    def _tokens(self, messages: list[Any], counts: list[int], *, cut: str = "", **template: bool) -> torch.Tensor:
        """Ids of the conversation, the mark of each image repeated for each of its tokens."""
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **template).rstrip(cut)
        ids, left = [], iter(counts)
        for one in self._tokenizer(text)["input_ids"]:
            ids += [one] * (next(left) if one == self._image_id else 1)
        return torch.tensor(ids)


class MicroBatches:
    """Micro-batches by number, in an order that depends on the seed and the epoch only."""

    def __init__(self, samples: Samples, samples_each: int, seed: int) -> None:
        self._samples, self._samples_each, self._seed = samples, samples_each, seed

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        epoch, place = divmod(number, len(self._samples) // self._samples_each)
        order = torch.randperm(len(self._samples), generator=torch.Generator().manual_seed(self._seed + epoch))
        return self._samples.batch(order[place * self._samples_each :][: self._samples_each].tolist())


def summed_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The cross entropy of a batch's answers, summed, and how many label tokens it has."""
    labels = batch.pop("labels")[:, 1:].flatten()
    logits = model(**batch).logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return loss, int((labels != NO_LABEL).sum())
