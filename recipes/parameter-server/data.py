"""Micro-batches of Qwen2.5-VL from the samples that vlmpipe exports (`data_format: trl`)."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoImageProcessor, AutoTokenizer

NO_LABEL = -100


class MicroBatches:
    """Micro-batches by number, in an order that depends on the seed and the epoch only."""

    def __init__(self, data: Path, model: Path, samples_each: int, seed: int) -> None:
        self._data, self._samples_each, self._seed = data, samples_each, seed
        self._samples = [json.loads(line) for line in (data / "train.jsonl").open()]
        # Not AutoProcessor: its half for videos needs torchvision.
        self._tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        self._images = AutoImageProcessor.from_pretrained(model, trust_remote_code=False)
        self._image_id = json.loads((model / "config.json").read_text())["image_token_id"]
        self._encoded = functools.lru_cache(4096)(self._encode)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """The model's inputs, and `labels`, which are -100 outside of answers. All (samples, tokens) but the pixels."""
        epoch, place = divmod(number, len(self._samples) // self._samples_each)
        order = torch.randperm(len(self._samples), generator=torch.Generator().manual_seed(self._seed + epoch))
        chosen = order[place * self._samples_each :][: self._samples_each]
        ids, labels, pixels, grids = zip(*(self._encoded(int(one)) for one in chosen), strict=True)
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
