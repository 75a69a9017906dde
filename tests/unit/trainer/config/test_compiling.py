"""`train.compile: auto` compiles where it helps; what cannot be compiled is refused with what works."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.config.compiling import CompileChoice, compile_choice
from vlmpipe.trainer.config.strategies import COMPILING
from vlmpipe.trainer.config.train import TrainConfig

B = 10**9
STRATEGIES = get_args(TrainConfig.model_fields["strategy"].annotation)


def train(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({"global_batch_size": 8, "optimizer": {"learning_rate": 1e-3}} | changes)


def choice(
    *, on_gpu: bool = True, parameters: int = B, tokens: int = 2048, nf4: bool = False, gcc: bool = True, **changes: Any
) -> CompileChoice:
    return compile_choice(
        train(**changes),
        on_gpu=on_gpu,
        parameters=parameters,
        sequence_length=tokens,
        quantizes_base=nf4,
        has_compiler=gcc,
    )


@pytest.mark.parametrize(
    ("case", "state"),
    [
        ({}, "on"),
        ({"parameters": 7 * B}, "on"),  # few tokens
        ({"tokens": 8192}, "on"),  # a small model
        ({"parameters": 7 * B, "tokens": 8192}, "off"),
        ({"parameters": 7 * B, "micro_batch_size": 4}, "off"),
        ({"on_gpu": False}, "off"),
        ({"gcc": False}, "off"),
        ({"nf4": True}, "off"),
        ({"strategy": "zero3"}, "off"),
        ({"activation_checkpointing": "full", "activation_offloading": True}, "off"),
        ({"parameters": 7 * B, "tokens": 8192, "float8": "tensorwise"}, "on"),
        ({"on_gpu": False, "float8": "tensorwise"}, "off"),  # emulated
    ],
)
def test_auto_is_on_where_compiling_helps(case: dict[str, Any], state: str) -> None:
    found = choice(**case)
    assert found.state == state and found.why


@pytest.mark.parametrize("state", ["on", "off"])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_choice_of_the_run_file_stays(state: str, on_gpu: bool) -> None:
    assert choice(compile=state, on_gpu=on_gpu, parameters=7 * B, tokens=8192).state == state


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_compiles_or_says_which_do(strategy: str) -> None:
    changes = {name.removeprefix("train."): value for name, value in strategy_changes(strategy).items()}
    if strategy in COMPILING:
        assert train(compile="on", **changes).compile == "on"
        return
    assert strategy == "zero3"
    with pytest.raises(ValidationError, match=r"use one of ddp, .* or leave compile at auto"):
        train(compile="on", **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategy": "zero2"}, "use one of ddp, fsdp, hsdp, or set float8 to none"),
        ({"precision": "fp32"}, "use bf16"),
        ({"precision": "bf16-autocast"}, "use bf16"),
        ({"compile": "off"}, "leave compile at auto"),
        ({"activation_checkpointing": "full", "activation_offloading": True}, "leave activation_offloading out"),
    ],
)
def test_float8_is_refused_with_what_works(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        train(float8="rowwise", **changes)
    assert train(float8="rowwise").float8 == "rowwise"
