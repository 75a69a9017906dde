"""The planner's memory against a real step whose samples share prefixes, what merging attention takes included."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.planner.memory_bounds import PEAK
from tests.support.planner.planned_memory import predicted
from tests.support.trainer.measure_memory import Scales, draw, packed_batch
from tests.support.trainer.memory_cases import Case
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.models.attention import attend
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.kernels import Kernel
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.strategies.registry import build_strategy
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape

TOKENS, IMAGE = 512, 64
# Lengths of segments, and prefixes: 16 questions about an image, and four pairs with a question of their own each.
LAYOUTS = {
    "questions": ([IMAGE, *[28] * 16], [(0, IMAGE, TOKENS)]),
    "pairs": (
        [IMAGE, *[16, 48, 48] * 4],
        [(0, IMAGE, TOKENS), *((start, start + 16, start + 112) for start in range(IMAGE, TOKENS, 112))],
    ),
}
WORKER = ProcessContext(0, 1, 0, 1, torch.device("cpu"))
ROWS = SequenceShape(sequences=2, tokens=TOKENS, images=8, label_tokens=384)
CASES = {
    checkpointing: Case(
        "ddp", {"train.activation_checkpointing": checkpointing, "data.sequence_length": TOKENS}, rows=ROWS
    )
    for checkpointing in ("none", "full")
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_merging_attention_does_not_move_the_planned_peak(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a layer's attention gathers is gone before its feed-forward layer takes more."""
    scales, merged = Scales(), list[int]()
    original = attend._kernel_with

    def weighed(*given: Any) -> Kernel:
        """The kernel, whose operations inside of the one that torch sees are weighed too."""
        kernel = original(*given)
        merged.append(given[-1] is not None)

        def inside(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                with scales:
                    return function(*args)

            return run

        return Kernel(inside(kernel.forward), inside(kernel.backward))

    monkeypatch.setattr(attend, "_kernel_with", weighed)
    found = _peak(CASES[name], layout, scales)
    assert merged and all(merged)
    assert predicted(CASES[name], 1)["peak"] == pytest.approx(found, rel=PEAK)


def _peak(case: Case, layout: str, scales: Scales) -> int:
    """Bytes held at the fullest moment of a second step, on one rank."""
    job = case.config(1)
    family = family_of(job.model)
    torch.manual_seed(0)
    lengths, spans = LAYOUTS[layout]
    samples = CuSeqlens.of([lengths] * ROWS.sequences, TOKENS, [spans] * ROWS.sequences)
    with scales:
        model = family.skeleton(job.model, vocabulary=case.vocabulary)
        draw(model)
        module = family.training_module(job.model, model, cached=case.cached).train()
        Recompute.of(job.train).apply(family, module)
        strategy = build_strategy(job.train, module, family.blocks(module), WORKER)
        made = [packed_batch(job.model, case.rows, case.vocabulary, cached=case.cached) for _ in range(case.passes)]
        batches = [replace(batch, samples=samples) for batch in made]
        for _ in range(2):
            gc.collect()
            scales.peak_bytes = 0
            strategy.forward_backward(batches, sum(len(batch.label_ids) for batch in batches))
            strategy.step(1.0)
    return scales.peak_bytes
