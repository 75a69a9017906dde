"""8-bit moments: their error, what they take, and states that are saved and loaded without a change."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.optimizer.adamw_8bit import AdamW8bit
from vlmpipe.trainer.sizing.optimizer_state import BLOCK, BYTES_8_BIT, fits_8_bits

RATE = 1e-2


def parameters_of(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((32, 2 * BLOCK), (48, 16), (40,))]


def optimizer_of(parameters: list[nn.Parameter], kind: type[torch.optim.AdamW] = AdamW8bit) -> torch.optim.AdamW:
    groups = [
        {"params": [one], "lr": RATE, "weight_decay": 0.1, "state_bits": 8 if fits_8_bits("", one.shape) else 32}
        for one in parameters
    ]
    return kind(groups, betas=(0.9, 0.95), eps=1e-8)


def train(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            scales = 10 ** torch.linspace(-6, 0, len(parameter)).view(-1, *[1] * (parameter.ndim - 1))
            parameter.grad = torch.randn(parameter.shape, generator=generator) * scales
        optimizer.step()


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [held[name] for held in optimizer.state_dict()["state"].values() for name in ("exp_avg", "exp_avg_sq")]


def test_updates_stay_close_to_those_of_fp32_moments_and_small_tensors_equal_them() -> None:
    start, found, expected = parameters_of(), parameters_of(), parameters_of()
    train(found, optimizer_of(found), range(20))
    train(expected, optimizer_of(expected, torch.optim.AdamW), range(20))
    matrix, small, vector = zip(start, found, expected, strict=True)
    assert 0 < (matrix[1] - matrix[2]).norm() < 0.1 * (matrix[2] - matrix[0]).norm()
    for _, one, other in (small, vector):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_large_matrices_take_two_bytes_a_parameter() -> None:
    parameters = parameters_of()
    optimizer = optimizer_of(parameters)
    train(parameters, optimizer, range(1))
    assert isinstance(optimizer, AdamW8bit)
    held_bytes = sum(tensor.nbytes for tensor in optimizer.moment_tensors())
    assert held_bytes == pytest.approx(BYTES_8_BIT * parameters[0].numel())
    held = [value for own in optimizer.state.values() for value in own.values() if value.numel() > 1]
    assert sum(one.numel() for one in held) == 2 * (48 * 16 + 40), "fp32 moments of the small ones alone"


@given(steps=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_a_loaded_state_continues_bit_for_bit(steps: int, seed: int) -> None:
    """Moments that are dequantized for a checkpoint and quantized again are the same moments."""
    straight = parameters_of(seed)
    optimizer = optimizer_of(straight)
    train(straight, optimizer, range(steps))
    resumed = [nn.Parameter(parameter.detach().clone()) for parameter in straight]
    other = optimizer_of(resumed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(torch.equal(one, two) for one, two in zip(moments(optimizer), moments(other), strict=True))
    for parameters, own in ((straight, optimizer), (resumed, other)):
        train(parameters, own, range(steps, steps + 2))
    assert all(torch.equal(one, two) for one, two in zip(straight, resumed, strict=True))


def test_a_step_after_a_resume_reads_no_number_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number that the host reads of a GPU's tensor waits for the GPU: once for every matrix, in every step."""
    parameters = parameters_of()
    optimizer = optimizer_of(parameters)
    train(parameters, optimizer, range(2))
    resumed = optimizer_of(parameters)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    reads = list[str]()

    def counted(name: str) -> Callable[[Tensor], object]:
        original = getattr(Tensor, name)
        return lambda tensor: (reads.append(name), original(tensor))[1]

    for name in ("__int__", "__float__", "__bool__", "item", "tolist"):
        monkeypatch.setattr(Tensor, name, counted(name))
    train(parameters, resumed, range(2, 3))
    assert not reads
    assert int(torch.ones(())) == 1 and reads, "the probe sees such reads"
    assert [int(held["step"]) for held in resumed.state_dict()["state"].values()] == [3, 3, 3]


@pytest.mark.parametrize(("first", "then"), [(AdamW8bit, torch.optim.AdamW), (torch.optim.AdamW, AdamW8bit)])
def test_states_load_into_the_other_precision(first: type[torch.optim.AdamW], then: type[torch.optim.AdamW]) -> None:
    parameters = parameters_of()
    optimizer = optimizer_of(parameters, first)
    train(parameters, optimizer, range(3))
    other = optimizer_of(parameters, then)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, two in zip(moments(optimizer), moments(other), strict=True):
        torch.testing.assert_close(one, two, rtol=0.2, atol=1e-2 * float(one.abs().max()))
    train(parameters, other, range(3, 4))


def test_embedding_and_head_keep_fp32() -> None:
    assert fits_8_bits("model.layers.0.mlp.up_proj.weight", (64, BLOCK))
    assert not fits_8_bits("model.embed_tokens.weight", (64, BLOCK)) and not fits_8_bits("lm_head.weight", (64, BLOCK))
    assert not fits_8_bits("x", (64, BLOCK + 1)) and not fits_8_bits("x", (4, BLOCK)) and not fits_8_bits("x", (8192,))


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match="bitsandbytes") as caught:
        optimizer_of(parameters_of())
    assert caught.value.code == ExitCode.UNAVAILABLE and "vlmpipe[qlora]" in str(caught.value)
