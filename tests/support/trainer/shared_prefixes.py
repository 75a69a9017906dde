"""Samples that share images, trained with their prefixes computed once and each by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.trainer.native_models import picture
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.loader import PackedLoader, PackedSequence
from vlmpipe.trainer.data.prefixes.groups import PrefixGroups
from vlmpipe.trainer.data.prepare.pipeline import prepare
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.dataloading.batches import PackedBatch, collate, online_images
from vlmpipe.trainer.features.preferences.objectives import pair_loss_of
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.storage import open_storage

SIDE = 16
LLAVA: dict[str, Any] = {
    "tower": {
        "config": {
            "model_type": "siglip_vision_model", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 16, "patch_size": 8, "image_size": 16,
        }
    },
    "language_model": {
        "config": {
            "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        }
    },
    "tokenizer": "train:300", "image_size": 16, "freeze": [],
}  # fmt: skip

Change = Callable[[PackedBatch], PackedBatch]


def write_questions(folder: Path) -> dict[str, Any]:
    """LLaVA records: images with one to five questions of a record each, two images of one size with equal questions,
    two images in a record, records of two turns, of which the first is the same, and one without an image."""
    folder.mkdir(parents=True)
    records: list[dict[str, Any]] = []

    def record(name: str, images: Sequence[int], *turns: tuple[str, str], split: str = "train") -> None:
        marks = "<image>\n" * len(images)
        said = [(marks + turns[0][0], turns[0][1]), *turns[1:]]
        texts = [
            {"from": role, "value": text} for turn in said for role, text in zip(("human", "gpt"), turn, strict=True)
        ]
        names = {"image": [f"{number}.png" for number in images]} if images else {}
        records.append({"id": name, "split": split, "conversations": texts} | names)

    for number in range(7):
        (folder / f"{number}.png").write_bytes(picture(number, (SIDE, SIDE)))
    for number in (0, 1):  # two images of one size, about which the same is asked
        for place, colour in enumerate(("red", "green", "blue")):
            record(f"same-{number}-{place}", [number], (f"Is it {colour}?", ("yes", "no")[(number + place) % 2]))
    for place in range(5):
        record(f"five-{place}", [2], (f"What is at place {place}?", f"object {place} " * (place + 1)))
    for place in range(3):
        record(f"two-{place}", [3, 4], (f"Which is the {place}th?", f"the one of {place}"))
    for place in range(3):
        turns = (("What is this?", "a picture"), (f"And part {place}?", f"part {place}"))
        record(f"turns-{place}", [5], *turns)
    record("alone", [6], ("What is alone?", "this one"))
    record("text", [], ("No image?", "none"))
    record("held-out", [6], ("Held out?", "yes"), split="validation")
    (folder / "records.json").write_text(json.dumps(records))
    return {
        "source": str(folder / "records.json"), "image_folder": str(folder), "sequence_length": 192,
        "max_images_per_sequence": 16, "max_reject_fraction": 0.0,
    }  # fmt: skip


def write_pairs(folder: Path) -> dict[str, Any]:
    """LLaVA records with a rejected answer: several about an image with equal and other questions, two images of one
    size, a lone one, two images in a record, a second turn, and one without an image. Some answers begin alike."""
    folder.mkdir(parents=True)
    for number in range(6):
        (folder / f"{number}.png").write_bytes(picture(number, (SIDE, SIDE)))
    answers = [("yes it is", "yes, but not here"), ("it is a long one, as it seems", "no"), ("no", "I cannot see it")]
    records: list[dict[str, Any]] = []

    def record(name: str, images: Sequence[int], *said: str, rejected: str, split: str = "train") -> None:
        texts = ["<image>\n" * len(images) + said[0], *said[1:]]
        turns = [{"from": ("human", "gpt")[place % 2], "value": text} for place, text in enumerate(texts)]
        names = {"image": [f"{number}.png" for number in images]} if images else {}
        records.append({"id": name, "split": split, "conversations": turns, "rejected": rejected} | names)

    for number in (0, 1):
        for place, (chosen, rejected) in enumerate(answers):
            record(f"same-{number}-{place}", [number], f"Is it {place % 2}?", chosen, rejected=rejected)
    record("alone", [2], "What is alone?", "this one", rejected="that one")
    for place, (chosen, rejected) in enumerate(answers[:2]):
        record(f"two-{place}", [3, 4], f"Which is the {place}th?", chosen, rejected=rejected)
        record(f"turns-{place}", [5], "What is this?", "a picture", f"And part {place}?", chosen, rejected=rejected)
    record("text", [], "No image?", "none at all", rejected="none")
    record("held-out", [2], "Held out?", "yes", rejected="no", split="validation")
    (folder / "records.json").write_text(json.dumps(records))
    return {
        "source": str(folder / "records.json"), "image_folder": str(folder), "sequence_length": 256,
        "max_images_per_sequence": 16, "max_reject_fraction": 0.0,
    }  # fmt: skip


def job_of(root: Path, model: dict[str, Any], data: dict[str, Any], **train: Any) -> JobConfig:
    return JobConfig.model_validate({
        "version": 1, "name": "test", "run": {"run_id": "run-1", "root_uri": str(root)}, "model": model, "data": data,
        "train": {"global_batch_size": 2, "optimizer": {"learning_rate": 0.001}, **train}, "features": {"cache": "off"},
    })  # fmt: skip


@dataclass(frozen=True)
class Computed:
    """loss: of all samples. hidden: of each sample, or conversation of a pair, behind its prefix, by its id. gradients:
    of each parameter."""

    loss: float
    hidden: dict[str, Tensor]
    gradients: dict[str, Tensor]


def apart(found: Computed, expected: Computed) -> dict[str, float]:
    """Largest differences: of the loss, relative; of hidden states, and of gradients, of the largest of them all."""
    largest = max(float(each.abs().max()) for each in expected.gradients.values())
    widest = max(float(each.abs().max()) for each in expected.hidden.values())
    assert found.gradients.keys() == expected.gradients.keys() and found.hidden.keys() == expected.hidden.keys()
    gradients = (found.gradients[name] - each for name, each in expected.gradients.items())
    pairs = [(found.hidden[name], each) for name, each in expected.hidden.items()]
    shortest = [min(len(one), len(other)) for one, other in pairs]
    hidden = (one[-n:] - other[-n:] for (one, other), n in zip(pairs, shortest, strict=True))
    return {
        "loss": abs(found.loss / expected.loss - 1),
        "hidden": max(float(each.abs().max()) for each in hidden) / widest,
        "gradients": max(float(each.abs().max()) for each in gradients) / largest,
    }


@dataclass
class SharedPrefixes:
    """Data of `write_questions` or `write_pairs`, prepared with prefixes, and a model to train on it.

    references: log probabilities of pairs, (samples, 2); None: these are asked for, and their sum is the loss.
    """

    job: JobConfig
    dtype: torch.dtype = torch.float64
    references: np.ndarray | None = None
    module: Any = field(init=False)

    def __post_init__(self) -> None:
        self.uri = prepare(self.job, Progress(self.job.run.run_uri, "prepare-data", quiet=True)).uri
        self.storage, self.form = open_storage(self.uri), image_form_of(self.job.model)
        self.split = Index.load(self.uri).split("train")
        self.chat = Chat.load(self.storage, self.form)
        family = family_of(self.job.model)
        model = family.build(self.job.model, self.chat.tokenizer)
        with torch.no_grad():
            for weight in model.parameters():  # so large that attention tells tokens apart
                weight.mul_(4 if weight.ndim > 1 and float(weight.abs().max()) < 1 else 1)
        self.module = family.training_module(self.job.model, model, cached=False).to(self.dtype).train()
        self.module.token_loss.pair_loss = pair_loss_of(self.job.train)
        self.groups = self.split.prefix_groups(0)
        prepare_images = image_preparer(self.job.model)
        self.images = online_images(prepare_images)

    def sampler(self, groups: PrefixGroups | None) -> PackedBatchSampler:
        in_pairs = self.job.train.in_pairs
        return PackedBatchSampler(
            self.split, self.job.data, seed=0, global_batch_size=2, in_pairs=in_pairs, prefixes=groups
        )

    def sequences(self, groups: PrefixGroups | None) -> list[PackedSequence]:
        """All sequences of the first epoch."""
        sampler = self.sampler(groups)
        loader = PackedLoader(self.split, sampler, self.chat, ShardReader.open(self.storage), images=True)
        loader.references = self.references
        return [row for step in range(sampler.num_steps(1)) for row in loader.sequences_for_step(step, 0, 1)]

    def computed_in(self, dtype: torch.dtype) -> tuple[Computed, Computed]:
        """With shared prefixes and without, in a precision of their own."""
        usual = self.dtype
        self.dtype = dtype
        self.module.to(dtype)
        try:
            return self.computed(self.groups), self.computed(None)
        finally:
            self.dtype = usual
            self.module.to(usual)

    def computed(self, groups: PrefixGroups | None, change: Change = lambda batch: batch) -> Computed:
        """Of all sequences, two in a batch. change: what is made of each batch before it is computed."""
        module: Any = self.module
        module.zero_grad(set_to_none=True)
        rows, hidden, total = self.sequences(groups), dict[str, Tensor](), 0.0
        states: list[Tensor] = []

        def note(_module: nn.Module, _args: object, output: Any) -> None:
            states.append(output.last_hidden_state.detach())

        with module.language_model.register_forward_hook(note):
            for start in range(0, len(rows), 2):
                batch = rows[start : start + 2]
                inputs = change(collate(batch, self.images)).to(torch.device("cpu"))
                loss = module(**_as(inputs, self.dtype)).sum()
                loss.backward()
                total += float(loss.detach())
                for row, state in zip(batch, states.pop(), strict=True):
                    ends = torch.tensor(row.sample_tokens).cumsum(0).tolist()
                    for name, count, end in zip(self.names(row), row.sample_tokens, ends, strict=True):
                        hidden[name] = state[end - count : end]
        gradients = {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}
        return Computed(total, hidden, gradients)

    def names(self, row: PackedSequence) -> list[str]:
        """Of each sample, or conversation of a pair."""
        if not self.job.train.in_pairs:
            return list(row.sample_ids)
        return [f"{name} {side}" for name in row.sample_ids for side in ("chosen", "rejected")]


def _as(inputs: Any, dtype: torch.dtype) -> Any:
    """Inputs with images of this type."""
    images = inputs["images"]
    named = isinstance(images, dict)
    changed = {name: _cast(each, dtype) for name, each in images.items()} if named else _cast(images, dtype)
    return inputs | {"images": changed}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
