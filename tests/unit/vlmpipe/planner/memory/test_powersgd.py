"""What of gradients travels under PowerSGD by shapes, and what ranks make of each other's errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress

from tests.support.planner.configs import LLAVA_7B
from tests.support.trainer.flop_cases import CASES, model_config
from vlmpipe.planner.memory.powersgd import moving_parts, numbers_in_factors, numbers_sent
from vlmpipe.trainer.config.train_options import PowerSgdConfig
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.ddp_gradients import MIN_COMPRESSION_RATE, factors_rank
from vlmpipe.trainer.sizing.model_shape import Matrices
from vlmpipe.trainer.strategies.powersgd import PowerSgd

SIDE = st.integers(1, 300)


@given(SIDE, SIDE, st.integers(1, 40))
def test_what_is_compressed_is_what_torch_compresses(rows: int, columns: int, rank: int) -> None:
    asked = min(rows, columns, rank)
    compressed, _, _ = _should_compress(rows, columns, asked, MIN_COMPRESSION_RATE)
    assert factors_rank(rows, columns, rank) == (asked if compressed else 0)


@pytest.mark.parametrize(
    "name", [name for name in CASES if "tower" in name or "nothing frozen" in name or "adapters" in name]
)
def test_the_planner_counts_what_the_trained_tensors_of_a_model_make_of_it(name: str) -> None:
    config, rank = model_config(**CASES[name]), 1
    family = family_of(config)
    with torch.device("meta"):
        module = family.training_module(config, family.skeleton(config, vocabulary=300), cached=False)
    sent = factors = 0
    for parameter in module.parameters():
        if parameter.requires_grad:
            rows, columns = len(parameter), parameter.numel() // len(parameter)
            of_rank = factors_rank(rows, columns, rank)
            factors += of_rank * (rows + columns)
            sent += of_rank * (rows + columns) or parameter.numel()
    shape = family.shape(config)
    assert 0 < factors <= sent < shape.trainable_parameters
    assert (numbers_in_factors(shape, rank), numbers_sent(shape, rank)) == (factors, sent)


def test_a_bucket_of_a_reduction_server_is_larger_and_a_head_below_its_size_is_none_by_itself() -> None:
    matrices = (Matrices(1 << 10, 1 << 10, 90),)
    shape = replace(LLAVA_7B, trained_matrices=matrices, parameters={**LLAVA_7B.parameters, "head": 10 << 20})
    of_reducers, plain = (moving_parts(shape, {"backward": {}, "end": {}}, reducers=on) for on in (True, False))
    both, matrix_mib = 2 << 20, 4  # a copy and an error of each MiB
    assert (plain["backward"].bytes, plain["end"].bytes) == (both * 40, both * (25 + matrix_mib))
    assert (of_reducers["backward"].bytes, of_reducers["end"].bytes) == (0, both * (64 + matrix_mib))


class Saved:
    """A tensor as a checkpoint's metadata have it."""

    def __init__(self, numbers: int) -> None:
        self.size = torch.Size([numbers])


PARAMETER = nn.Parameter(torch.zeros(40, 40))


def hook(rank: int, ranks: int, of_rank: int = 2) -> PowerSgd:
    return PowerSgd(PowerSgdConfig(rank=of_rank), {PARAMETER: "one"}, rank=rank, ranks=ranks)


@given(st.integers(1, 9), st.integers(1, 9))
def test_another_number_of_ranks_takes_on_the_mean_of_all_errors(before: int, after: int) -> None:
    errors = [torch.randn(PARAMETER.numel(), generator=torch.Generator().manual_seed(rank)) for rank in range(before)]
    saved: dict[str, Any] = {f"powersgd.error.{rank}.one": Saved(1600) for rank in range(before)}
    saved["powersgd.factor.one"] = Saved(80)
    taken = torch.zeros(PARAMETER.numel())
    for rank in range(after):
        one = hook(rank, after)
        wanted = one.wanted(saved)
        for number, filled in wanted["powersgd"]["error"].items():
            filled["one"].copy_(errors[int(number)])
        one.restore(wanted, saved)
        held = one.state()["powersgd"]["error"][str(rank)] if one.state() else {}
        taken += held.get("one", 0)
        if before == after:
            assert torch.equal(held["one"], errors[rank]), "each has its own"
    torch.testing.assert_close(taken / after, torch.stack(errors).mean(0), rtol=1e-4, atol=1e-6)


def test_factors_of_another_rank_than_the_run_file_s_are_drawn_anew() -> None:
    saved: dict[str, Any] = {"powersgd.error.0.one": Saved(1600), "powersgd.factor.one": Saved(80)}
    kept, drawn = (hook(0, 1, of_rank).wanted(saved)["powersgd"] for of_rank in (2, 3))
    assert list(kept["factor"]) == ["one"] and drawn["factor"] == {}
    assert list(drawn["error"]["0"]) == ["one"]


def test_nothing_is_asked_of_a_checkpoint_that_has_nothing_of_it() -> None:
    assert hook(0, 2).wanted({"model.one": Saved(1600)}) == {}
    assert hook(0, 2).state() == {}
