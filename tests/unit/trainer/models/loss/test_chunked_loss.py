"""The loss in chunks is the loss: value and gradients, whatever the chunks, also of a head that ranks split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from vlmpipe.trainer.models.loss.chunked_loss import TokenLoss, chunked_losses, compute_in_chunks
from vlmpipe.trainer.tracing.memory_tracker import MemoryTracker

WIDTH, VOCABULARY = 12, 37
RELATIVE = 1e-6


def problem(labels: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(labels)
    hidden = torch.randn(labels, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (labels,), generator=generator)


def assert_equal(found: Any, expected: Any, relative: float = RELATIVE) -> None:
    """As a vector: single elements may cancel out to nothing."""
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.linalg.vector_norm(one - other) <= relative * torch.linalg.vector_norm(other)


@settings(max_examples=40)
@given(labels=st.integers(0, 40), chunk=st.integers(1, 50), scale=st.floats(0.01, 1000))
def test_chunks_change_neither_the_loss_nor_its_gradients(labels: int, chunk: int, scale: float) -> None:
    hidden, weight, label_ids = problem(labels)
    plain = F.cross_entropy(F.linear(hidden, weight), label_ids, reduction="sum")
    loss = chunked_losses(hidden, weight, label_ids, chunk)[0].sum()
    assert_equal([loss], [plain])
    assert_equal(*(torch.autograd.grad(one * scale, (hidden, weight)) for one in (loss, plain)))


@pytest.mark.parametrize("frozen", [(), ("weight",), ("hidden",)])
def test_a_frozen_head_gets_no_gradient_and_a_trained_one_under_bf16_loses_no_digits(frozen: tuple[str, ...]) -> None:
    """In bf16 plain logits have one rounding, and one more in the sum over chunks must not come to it."""
    hidden, weight, label_ids = problem(40)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight = nn.Parameter(weight.detach().clone())
    if "hidden" in frozen:
        hidden = hidden.detach()
    head.weight.requires_grad_("weight" not in frozen)
    gradients = []
    for chunk in (0, 3):
        loss = TokenLoss()
        if chunk:
            compute_in_chunks(loss, head, chunk)
        with torch.autocast("cpu", torch.bfloat16):
            total = loss(head, hidden, label_ids)
        asked = [tensor for tensor in (hidden, head.weight) if tensor.requires_grad]
        gradients.append([total.detach(), *torch.autograd.grad(total, asked)])
    assert_equal(gradients[1], gradients[0], relative=1e-2)


def test_logits_of_more_than_a_chunk_never_exist() -> None:
    labels, chunk, vocabulary = 64, 4, 5000
    hidden, weight = torch.randn(labels, WIDTH).requires_grad_(), torch.randn(vocabulary, WIDTH).requires_grad_()
    label_ids = torch.zeros(labels, dtype=torch.int64)
    peaks = {}
    for size in (labels, chunk):
        with MemoryTracker([hidden, weight, label_ids]) as tracker:
            loss = chunked_losses(hidden, weight, label_ids, size)[0].sum()
            forward = tracker.take_peak(next_category="backward").total_bytes
            loss.backward()
            peaks[size] = (forward, tracker.take_peak(next_category="backward").total_bytes - weight.nbytes)
        hidden.grad = weight.grad = None
    logits = 4 * labels * vocabulary
    assert all(peak >= logits for peak in peaks[labels]), "the comparison must mean something"
    assert all(peak < 3 * logits * chunk / labels + 4 * hidden.nbytes for peak in peaks[chunk])


@settings(max_examples=20)
@given(labels=st.integers(0, 40), chunk=st.integers(1, 50))
def test_misses_are_labels_that_greedy_decoding_would_not_choose(labels: int, chunk: int) -> None:
    hidden, weight, label_ids = problem(labels)
    chosen = F.linear(hidden, weight).argmax(dim=-1)
    label_ids[::2] = chosen[::2]
    with torch.no_grad():
        assert torch.equal(chunked_losses(hidden, weight, label_ids, chunk)[1], chosen != label_ids)
    assert not len(chunked_losses(hidden, weight, label_ids, chunk)[1]), "training counts none"


def test_a_sharded_head_gives_the_whole_loss_on_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in turn: what they sum is put together by hand, in the order in which they ask."""
    hidden, weight, label_ids = problem(20)
    expected = F.cross_entropy(F.linear(hidden, weight), label_ids, reduction="sum")
    of_hidden, of_weight = torch.autograd.grad(expected, (hidden, weight))
    halves = (weight[:19], weight[19:])
    logits = F.linear(hidden, weight).detach()
    answers = []
    for start in range(0, 20, 5):
        chunk, ids = logits[start : start + 5], label_ids[start : start + 5]
        largest = chunk.amax(dim=-1)
        sums = (chunk - largest[:, None]).exp().sum(dim=-1)
        answers += [largest, torch.stack([sums, chunk.gather(1, ids[:, None]).squeeze(1) - largest])]
    summed = torch.zeros_like(of_hidden)
    for first, half in zip((0, 19), halves, strict=True):
        left = list(answers)
        monkeypatch.setattr(dist, "all_reduce", lambda tensor, *_, left=left, **__: tensor.copy_(left.pop(0)))
        group: Any = object()
        loss = chunked_losses(hidden, half, label_ids, 5, first=first, group=group)[0].sum()
        assert not left
        assert_equal([loss], [expected])
        mine, own = torch.autograd.grad(loss, (hidden, half))
        assert_equal([own], [of_weight[first : first + len(half)]])
        summed += mine
    assert_equal([summed], [of_hidden])


def test_a_trace_of_three_chunks_finds_the_peaks_of_all() -> None:
    def peaks() -> list[int]:
        hidden, weight = torch.randn(70, WIDTH).requires_grad_(), torch.randn(5000, WIDTH).requires_grad_()
        label_ids = torch.zeros(70, dtype=torch.int64)
        with MemoryTracker([hidden, weight, label_ids]) as tracker:
            loss = chunked_losses(hidden, weight, label_ids, 4)[0].sum()
            forward = tracker.take_peak(next_category="backward").total_bytes
            loss.backward()
            return [forward, tracker.take_peak(next_category="backward").total_bytes]

    with FakeTensorMode():
        traced = peaks()
    assert traced == pytest.approx(peaks(), rel=0.01)
