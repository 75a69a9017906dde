"""Sentences of plans on compiled layers and 8-bit products. Their time is in `vlmpipe.planner.time.computing`."""

from __future__ import annotations

from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time.computing import (
    BYTES_PER_NUMBER,
    COMPILED_BYTES_PER_NUMBER,
    MIN_WIDTH_FOR_FLOAT8,
    float8_gain,
)


def kernel_sentences(case: Scenario) -> list[str]:
    """Assumptions as sentences."""
    recipe, sentences = case.config.train.float8, []
    if case.compiling.on:
        sentences.append("Memory is that of uncompiled layers; compiling, minutes in the first step, is not counted.")
    if recipe == "rowwise":
        sentences.append("Not counted: 8-bit copies for the backward pass; a published run took 23 % more memory.")
    if case.config.plan.efficiency:
        return sentences
    if case.compiling.on:
        sentences.append(
            f"Compiled layers are taken to move {COMPILED_BYTES_PER_NUMBER / BYTES_PER_NUMBER:.0%} of the bytes that "
            "kernels move which are not fused, and to launch without delay."
        )
    gain = float8_gain(recipe, case.shape.language.hidden)
    if gain > 1:
        sentences.append(f"float8 {recipe}: products of language layers are taken to be {gain:.2f} times as fast.")
    elif recipe != "none":
        sentences.append(
            f"float8 {recipe} is taken to gain nothing below a width of {MIN_WIDTH_FOR_FLOAT8:,}: at 2,048 an H200 "
            "was slower with it than without."
        )
    return sentences
