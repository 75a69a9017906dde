"""What plans say of compiled layers and products of 8-bit floats. Their time: `vlmpipe.planner.time.computing`."""

from __future__ import annotations

from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time.computing import BYTES_PER_NUMBER, COMPILED_BYTES_PER_NUMBER, FLOAT8


def kernel_sentences(case: Scenario) -> list[str]:
    """Assumptions as sentences."""
    recipe, said = case.config.train.float8, []
    if case.compiling.on:
        said.append("Memory is that of uncompiled layers; compiling, minutes in the first step, is not counted.")
    if recipe == "rowwise":
        said.append("Not counted: 8-bit copies for the backward pass; a published run took 23 % more memory.")
    if case.config.plan.efficiency:
        return said
    if case.compiling.on:
        said.append(
            f"Compiled layers are taken to move {COMPILED_BYTES_PER_NUMBER / BYTES_PER_NUMBER:.0%} of the bytes that "
            "kernels move which are not fused, and to launch without delay."
        )
    if recipe != "none":
        said.append(f"float8 {recipe}: products of language layers are taken to be {FLOAT8[recipe]:.2f} times as fast.")
    return said
