"""How much faster computing is with compiled layers and with products of 8-bit floats."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpipe.planner.scenario import Scenario

# Read, tokens/s of one GPU in torchtitan's runs of an 8B model on 8 H100, sequences of 8,192 tokens: 5,762 eager and
# 6,667 compiled (benchmarks, 2024-12); compiled, on other machines, 5,760 in bf16, 7,186 tensorwise (which gathered
# weights in 8 bits too) and 6,424 rowwise (commit 7a04053, 2025-01).
COMPILED = 6667 / 5762
FLOAT8 = {"tensorwise": 7186 / 5760, "rowwise": 6424 / 5760}


@dataclass(frozen=True)
class Speedup:
    """A factor of the rate of computing, relative to eager layers in bf16, and where it comes from."""

    factor: float
    sentences: tuple[str, ...]


def kernel_speedup(case: Scenario) -> Speedup:
    """1 where `plan.efficiency` was measured: it holds whatever the run did."""
    recipe, said, factor = case.config.train.float8, [], 1.0
    if case.compiling.on:
        factor = COMPILED
        said.append(
            f"Compiled layers are taken to be {COMPILED:.2f} times as fast, as in a published run of an 8B model on 8 "
            "H100; small models may gain more. Compiling, minutes before the first step ends, is not counted."
        )
        said.append("Memory is that of layers that are not compiled.")
    if recipe != "none":
        factor *= FLOAT8[recipe]
        said.append(
            f"float8 {recipe} is taken to be {FLOAT8[recipe]:.2f} times as fast, as in published runs of an 8B model."
        )
        if recipe == "rowwise":
            said.append("Not counted: 8-bit copies for the backward pass, for which such a run took 23 % more memory.")
    return Speedup(1.0 if case.config.plan.efficiency else factor, tuple(said))
