"""Part `checkpointing`: what activation checkpointing costs steps in which calls of operators are all that counts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import Measured
from benchmarks.training.step_split import one_thread
from vlmpipe.trainer.models.layers.recompute_policy import recompute_layers
from vlmpipe.trainer.models.layers.saved_products import PRODUCTS, Reuse

STEPS = 20  # a round
NOTE = (
    "Checkpointing: a language model of four layers, 32 wide, with eight tokens. Full checkpointing repeats all of a "
    "layer, selective checkpointing all but the products, which cost no more than the others here. By modes: as torch "
    "chooses operations, by a call of Python for each."
)


def checkpointing(bench: Bench) -> None:
    """Full and selective checkpointing, the latter also by torch's modes, beside none."""
    with one_thread():
        steps = {name: partial(steps_of, model(name)) for name in ("none", "full", "selective", "selective, by modes")}
        found: dict[str, list[Measured]] = bench.take_timed_turns("small layers", steps)
    for name in list(steps)[1:]:
        sides = (name, found[name]), ("none", found["none"])
        bench.report.compare_rates("step: checkpointing or none", "small layers", "steps", *sides)
    pairs = zip(found["selective, by modes"], found["selective"], strict=True)
    saved = [1e3 * (modes.cpu_per_unit - ours.cpu_per_unit) for modes, ours in pairs]
    bench.report.figure("kernels in front of products save", "small layers", "CPU ms a step", Side("selective", saved))
    bench.report.note(NOTE)


def model(checkpoints: str) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = Qwen2Config(hidden_size=32, intermediate_size=64, num_hidden_layers=4, vocab_size=64, **heads)
    built: Any = Qwen2ForCausalLM(config).train()
    if checkpoints != "none":
        recompute_layers(built, selective=checkpoints.startswith("selective"))
    if "modes" in checkpoints:
        for layer in built.model.layers:
            layer._gradient_checkpointing_func = partial(
                torch.utils.checkpoint.checkpoint, use_reentrant=False, context_fn=modes
            )
    return built


def modes() -> tuple[Any, Any]:
    forward, recomputation = create_selective_checkpoint_contexts(PRODUCTS)
    return forward, Reuse(recomputation)


def steps_of(built: nn.Module) -> float:
    ids = torch.arange(8)[None]
    for _ in range(STEPS):
        built(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return STEPS
