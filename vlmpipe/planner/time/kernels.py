"""How much faster computing is with compiled layers and with products of 8-bit floats."""

from __future__ import annotations

from vlmpipe.planner.scenario import Scenario

# Read, tokens/s of one GPU in torchtitan's runs of an 8B model on 8 H100, sequences of 8,192 tokens: 5,762 eager and
# 6,667 compiled (benchmarks, 2024-12); compiled, on other machines, 5,760 in bf16, 7,186 tensorwise (which gathered
# weights in 8 bits too) and 6,424 rowwise (commit 7a04053, 2025-01).
COMPILED = 6667 / 5762
FLOAT8 = {"tensorwise": 7186 / 5760, "rowwise": 6424 / 5760}


def kernel_speedup(case: Scenario) -> float:
    """Rate of computing relative to eager layers in bf16; 1 where `plan.efficiency` says what was measured."""
    if case.config.plan.efficiency:
        return 1.0
    compiled = COMPILED if case.compiling.on else 1.0
    return compiled * FLOAT8.get(case.config.train.float8, 1.0)


def kernel_sentences(case: Scenario) -> list[str]:
    """What is assumed of kernels."""
    recipe, said = case.config.train.float8, []
    if case.compiling.on:
        said.append("Memory is that of uncompiled layers; compiling, minutes in the first step, is not counted.")
    if recipe == "rowwise":
        said.append("Not counted: 8-bit copies for the backward pass; a published run took 23 % more memory.")
    if case.config.plan.efficiency:
        return said
    if case.compiling.on:
        said.append(
            f"Compiled layers are taken to be {COMPILED:.2f} times as fast, as in a published run of an 8B model on 8 "
            "H100; small models may gain more."
        )
    if recipe != "none":
        said.append(f"float8 {recipe} is taken to be {FLOAT8[recipe]:.2f} times as fast, as in such runs.")
    return said
