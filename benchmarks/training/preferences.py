"""Part `preferences`: a DPO step with stored references beside one that computes them, and beside cross-entropy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.support.suite import Bench
from benchmarks.support.timing import close
from benchmarks.support.workloads import workload
from benchmarks.training.ready_steps import WARM_UP, ReadyStep, SteadySteps, packed_steps
from benchmarks.training.workloads import TOLERANCE
from vlmpipe.trainer.setup.training import build_training
from vlmpipe.trainer.strategies.base import Strategy

WIDTH, LAYERS = 384, 6  # products take most of a step
SETTINGS = (
    "train.objective=dpo",
    "data.max_samples=200",
    "train.global_batch_size=8",
    "train.micro_batch_size=4",
    f"model.language_model.config.hidden_size={WIDTH}",
    f"model.language_model.config.intermediate_size={3 * WIDTH}",
    f"model.language_model.config.num_hidden_layers={LAYERS}",
)


class ReferencesInTheStep(SteadySteps):
    """Two forward passes and one backward pass over the pairs: the first, without gradients, is the reference's."""

    def _train(self, steps: Sequence[ReadyStep]) -> None:
        for step in steps:
            super()._train([with_references(self.strategy, step)])


def with_references(strategy: Strategy, step: ReadyStep) -> ReadyStep:
    """The step's pairs with their log probabilities under the strategy's weights as they are."""
    found = []
    for batch in step.batches:
        assert batch.pairs and batch.pairs.references is None
        references = strategy.forward_loss(batch).float()
        found.append(dataclasses.replace(batch, pairs=dataclasses.replace(batch.pairs, references=references)))
    return dataclasses.replace(step, batches=found)


def preferences(bench: Bench) -> None:
    """The same model, weights and packed pairs on all sides."""
    load = workload(bench, "digits", SETTINGS, name="digits in pairs")
    steps = packed_steps(load, WARM_UP + (2 if bench.quick else 5))
    reference = build_training(load.cached, bench.worker).strategy
    alone = [
        dataclasses.replace(step, batches=[dataclasses.replace(one, pairs=None) for one in step.batches])
        for step in steps
    ]
    stored, inside = "references stored", "references in the step"
    sides = {
        stored: SteadySteps(load.cached, bench.worker, [with_references(reference, step) for step in steps]),
        inside: ReferencesInTheStep(load.cached, bench.worker, steps),
        "cross-entropy": SteadySteps(load.cached, bench.worker, alone),
    }
    found = bench.take_turns(load.name, sides, warm_up=False)
    law = f"stored references and those in the step give the first step the same loss (relative {TOLERANCE:g})"
    bench.report.require(close(sides[stored].losses[:1], sides[inside].losses[:1], TOLERANCE), law)
    for claim, name in {
        "DPO step: stored references beside two forward passes and one backward pass": inside,
        "DPO step: its loss beside cross-entropy over the same pairs": "cross-entropy",
    }.items():
        bench.report.compare_rates(claim, load.name, "useful tokens", (stored, found[stored]), (name, found[name]))
