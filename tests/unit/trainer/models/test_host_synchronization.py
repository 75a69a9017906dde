"""A training step reads no number of the device: the host would wait for all that it has ordered.

The step runs on the meta device, whose tensors have no numbers: whoever asks for one gets an error. What a GPU's host
waits for and meta has an answer to is looked for beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.short_form import chosen
from tests.support.trainer.measure_memory import packed_batch
from tests.support.trainer.memory_cases import ONLINE, ROWS, Case
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.models.attention.attend import ATTEND
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.optimizer import adamw_8bit  # noqa: F401, subclasses AdamW before a test replaces it
from vlmpipe.trainer.strategies.registry import build_strategy

aten = torch.ops.aten
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
    "qwen2_5_vl": Case("ddp", family="qwen2_5_vl"),
    "qwen2_5_vl online": Case("ddp", ONLINE, cached=False, family="qwen2_5_vl"),
    "qwen3_vl": Case("ddp", family="qwen3_vl"),
    "qwen3_vl online": Case("ddp", ONLINE, cached=False, family="qwen3_vl"),
}


@pytest.fixture(autouse=True)
def for_tensors_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast and the fused optimizer are for devices only."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    adamw = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *groups, fused, **settings: adamw(*groups, **settings))


Step = Callable[[], tuple[Tensor, Any]]


def step_of(case: Case) -> Step:
    """What makes one step of two micro-batches without numbers, and gives its loss and its norm."""
    job = case.config(1)
    family = family_of(job.model)
    with META:
        model = family.skeleton(job.model, vocabulary=VOCABULARY)
        module = family.training_module(job.model, model, cached=case.cached).train()
    Recompute.of(job.train).apply(family, module)
    strategy = build_strategy(job.train, module, family.blocks(module), ProcessContext(0, 1, 0, 1, META))
    batches = [packed_batch(job.model, ROWS, VOCABULARY, cached=case.cached) for _ in range(2)]

    def step() -> tuple[Tensor, Any]:
        loss = strategy.forward_backward(batches, 2 * ROWS.label_tokens)
        return loss, strategy.step(1.0).grad_norm

    return step


# Kernels that need to know on the host where samples begin are told so by a tensor that stays there.
TAKE_BOUNDS = (ATTEND, torch.ops.vlmpipe.attend_backward.default)


class Waits(TorchDispatchMode):
    """Errors where a GPU's host waits and the meta device has an answer all the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in TAKE_BOUNDS:
            return func(*args, **named)
        if func is aten.masked_scatter_backward.default:
            raise RuntimeError("a selection by a mask, in a gradient: the meta device does not look at it")
        given = tree_leaves((args, named))
        from_host = any(isinstance(one, Tensor) and one.ndim and one.device.type == "cpu" for one in given)
        made = func(*args, **named)
        to_device = any(isinstance(one, Tensor) and one.device == META for one in tree_leaves(made))
        if from_host and to_device and not (named.get("non_blocking") or (func is aten.copy_.default and args[2:])):
            raise RuntimeError(f"{func} copies from the host to the meta device and waits")
        return made


class Made(TorchFunctionMode):
    """Errors where numbers of Python become a tensor on the device, by a copy that waits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor) and made.device == META:
            raise RuntimeError("a tensor is made of numbers on the meta device")
        return made


# Online reads all that a model has: its tower and, of cached features, the rest.
SHORT = chosen(CASES, lambda name: name.startswith("llava ") or name.endswith("vl online"))


@pytest.mark.parametrize("case", SHORT.values(), ids=SHORT)
def test_a_step_does_not_read_the_device(case: Case) -> None:
    step = step_of(case)
    with Waits(), Made():
        for _ in range(2):  # the second has the optimizer's state
            loss, norm = step()
            assert loss.device == META and norm.device == META


def test_a_step_with_a_mask_does_not_read_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What models get that cannot attend by sample."""
    monkeypatch.setattr("vlmpipe.trainer.models.packed_vlm.use_varlen_attention", lambda _: None)
    step = step_of(CASES["llava"])
    with Waits(), Made():
        step()


Part = Callable[..., Any]


def grids_on_the_device(_tower: nn.Module, grids: Any, device: torch.device) -> dict[str, Any]:
    return {"grids": torch.tensor(grids).to(device)}


def tower_of_the_library(tower: nn.Module, patches: Tensor, sizes: dict[str, Any]) -> Tensor:
    output: Tensor = tower(patches, grid_thw=sizes["grids"]).pooler_output
    return output


def levels_by_a_mask(language_model: Any) -> None:
    theirs = language_model._deepstack_process
    language_model._deepstack_process = lambda hidden, _, level: theirs(
        hidden, hidden.new_zeros(hidden.shape[:2], dtype=torch.bool), level
    )


def scattered_by_a_mask(model: Any, input_ids: Tensor, images: Tensor) -> Tensor:
    embeddings = model.get_input_embeddings()(input_ids)
    is_image = (input_ids == model.config.image_token_id).unsqueeze(-1)
    scattered: Tensor = embeddings.masked_scatter(is_image, images.to(embeddings.dtype))
    return scattered


THE_LIBRARYS: dict[str, tuple[str, dict[str, Part | None]]] = {
    "the mask of packed rows": (
        "llava",
        {"packed_vlm.block_diagonal_mask": lambda *_: {"attention_mask": None}},
    ),
    "images at a mask's places": ("llava", {"llava.model.embedded": scattered_by_a_mask}),
    "levels at a mask's places": ("qwen3_vl", {"hf.model.add_levels_at_places": levels_by_a_mask}),
} | {
    f"sizes of images, {family}": (
        f"{family} online",
        {"hf.model.sizes_of": grids_on_the_device, "hf.model.tower_output": tower_of_the_library},
    )
    for family in ("qwen2_5_vl", "qwen3_vl")
}


@pytest.mark.parametrize(("case", "parts"), THE_LIBRARYS.values(), ids=THE_LIBRARYS)
def test_a_step_with_transformers_own_code_reads_the_device(
    case: str, parts: dict[str, Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, part in parts.items():
        monkeypatch.setattr(f"vlmpipe.trainer.models.{name}", part)
    step = step_of(CASES[case])
    with Waits(), Made(), pytest.raises((RuntimeError, NotImplementedError), match=r"meta|nonzero"):
        step()


def test_a_blocking_copy_from_the_host_is_detected() -> None:
    on_host, on_device = torch.zeros(2), torch.zeros(2, device=META)
    with Waits(), Made():
        on_host.to(META, non_blocking=True)
        on_device.copy_(on_host, non_blocking=True)
        waiting: list[Callable[[], Any]] = [
            lambda: on_host.to(META),
            lambda: on_device.copy_(on_host),
            lambda: on_device[torch.zeros(2, dtype=torch.int64)],
            lambda: torch.tensor([1], device=META),
            lambda: on_device.new_tensor([1]),
        ]
        for wait in waiting:
            with pytest.raises(RuntimeError, match="meta"):
                wait()


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_images_with_too_many_tokens_for_their_sequences_are_an_error(family: str) -> None:
    """By shapes: also of tensors without numbers."""
    case = Case("ddp", family=family)
    model = family_of(case.config(1).model)
    config = case.config(1).model
    with META:
        module = model.training_module(config, model.skeleton(config, vocabulary=VOCABULARY), cached=True)
    batch = packed_batch(config, ROWS, VOCABULARY, cached=True)
    with pytest.raises(DataError, match=r"the images of a micro-batch give \d+ tokens, .* expect 1\n"):
        module(**replace(batch, image_tokens=1).to(META))
