"""A training step reads no number of the device: the host would wait for all that it has ordered.

The step runs on the meta device, whose tensors have no numbers: whoever asks for one gets an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.measure_memory import row_batch
from benchmarks.memory_cases import ONLINE, ROWS, Case
from trainer.errors import DataError
from trainer.models.recompute import Recompute
from trainer.models.table import family_of
from trainer.strategies.table import build_strategy
from trainer.worker import Worker

META = torch.device("meta")
VOCABULARY = 300
CASES = {
    "llava": Case("ddp"),
    "llava online": Case("ddp", ONLINE, cached=False),
    "llava with all there is": Case(
        "ddp",
        {
            "train.ema_decay": 0.9,
            "train.loss_chunk_tokens": 20,
            "train.activation_checkpointing": "full",
            "train.clip_grad_norm": 1.0,
        },
    ),
    "llava adapters": Case("ddp", {"model.lora": {"rank": 8}}),
    "smolvlm": Case("ddp", family="smolvlm"),
    "smolvlm online": Case("ddp", ONLINE, cached=False, family="smolvlm"),
    "qwen2_5_vl": Case("ddp", family="qwen2_5_vl"),
}
# Of these the library reads: places of image tokens for each of its levels, and sizes of images in the tower.
READING = {
    "qwen3_vl": Case("ddp", family="qwen3_vl"),
    "qwen2_5_vl online": Case("ddp", ONLINE, cached=False, family="qwen2_5_vl"),
}


@pytest.fixture(autouse=True)
def for_tensors_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast and the fused optimizer are for devices only."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    adamw = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *groups, fused, **settings: adamw(*groups, **settings))


Step = Callable[[], tuple[torch.Tensor, Any]]


def step_of(case: Case) -> Step:
    """What makes one step of two micro-batches without numbers, and gives its loss and its norm."""
    job = case.config(1)
    family = family_of(job.model)
    with META:
        model = family.skeleton(job.model, vocabulary=VOCABULARY)
        module = family.training_module(job.model, model, cached=case.cached).train()
    Recompute.of(job.train).apply(family, module)
    strategy = build_strategy(job.train, module, family.blocks(module), Worker(0, 1, 0, 1, META))
    batches = [row_batch(job.model, ROWS, VOCABULARY, cached=case.cached) for _ in range(2)]

    def step() -> tuple[torch.Tensor, Any]:
        loss = strategy.forward_backward(batches, 2 * ROWS.label_tokens)
        return loss, strategy.step(1.0).grad_norm

    return step


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_reads_nothing(case: Case) -> None:
    step = step_of(case)
    for _ in range(2):  # the second has the optimizer's state
        loss, norm = step()
        assert loss.device == META and norm.device == META


@pytest.mark.parametrize("case", READING.values(), ids=READING)
def test_what_the_library_reads_is_found_here(case: Case) -> None:
    step = step_of(case)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"meta|nonzero"):
        step()


@pytest.mark.parametrize("ours", ["trainer.models.square_row.mask_of", "trainer.models.llava.count_nowhere"])
def test_without_what_we_put_in_its_place_the_library_reads(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, lambda *_, **__: None)
    step = step_of(CASES["llava"])
    with pytest.raises(RuntimeError, match="meta"):
        step()


@pytest.mark.parametrize("family", ["llava", "smolvlm", "qwen2_5_vl"])
def test_the_host_compares_what_images_give_with_what_rows_have_places_for(family: str) -> None:
    """By shapes: also of tensors without numbers."""
    case = Case("ddp", family=family)
    model = family_of(case.config(1).model)
    config = case.config(1).model
    with META:
        module = model.training_module(config, model.skeleton(config, vocabulary=VOCABULARY), cached=True)
    batch = row_batch(config, ROWS, VOCABULARY, cached=True)
    with pytest.raises(DataError, match=r"the images of a micro-batch give \d+ tokens, .* places for 1\n"):
        module(**replace(batch, image_tokens=1).to(META))
