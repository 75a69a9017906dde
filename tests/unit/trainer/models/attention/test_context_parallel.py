"""All ranks of a group together compute the attention of one, here as threads that exchange tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from vlmpipe.trainer.models.attention import context_parallel
from vlmpipe.trainer.models.attention.context_parallel import ContextParallel
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.varlen import attention

SAMPLES, WIDTH = CuSeqlens.of([[5, 2, 1], [8]], 8), 4


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Has threads with names 0, 1, ... be the ranks of a group."""

    def start(ranks: int) -> None:
        barrier, sent = threading.Barrier(ranks, timeout=20), [torch.empty(0)] * ranks

        def all_to_all(parts: Tensor, _group: str) -> Tensor:
            me = int(threading.current_thread().name)
            sent[me] = parts
            barrier.wait()
            received = torch.stack([one[me] for one in sent])
            barrier.wait()
            return received

        monkeypatch.setattr(context_parallel, "all_to_all", all_to_all)

    yield start


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"), [(2, 4, 2), (2, 4, 4), (4, 4, 1), (4, 4, 2), (4, 12, 6), (3, 6, 2)]
)
def test_attention_and_its_gradients_are_those_of_one_rank(
    ranks: int, heads: int, kv_heads: int, exchange: Callable[[int], None]
) -> None:
    """Key and value heads are repeated where they do not divide, and queries keep theirs."""
    exchange(ranks)
    tokens = 8 * 3 if ranks == 3 else 8
    samples = CuSeqlens.of([[13, 11], [24]], tokens) if ranks == 3 else SAMPLES
    noise = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, count, tokens, WIDTH, generator=noise).requires_grad_() for count in (heads, kv_heads, kv_heads)
    )
    whole, _ = attention(nn.Identity(), query, key, value, None, samples=samples)
    weights = torch.randn(whole.shape, generator=noise)
    expected = torch.autograd.grad((whole * weights).sum(), (query, key, value))

    def part(tensor: Tensor, rank: int) -> Tensor:
        """(sequences, tokens, ...) -> a rank's tokens of all sequences, in as many rows."""
        return tensor.flatten(0, 1).chunk(ranks)[rank].unflatten(0, (2, -1))

    outputs = [torch.empty(0)] * ranks

    def compute(rank: int) -> None:
        own = [part(each.transpose(1, 2), rank).transpose(1, 2) for each in (query, key, value)]
        outputs[rank], _ = attention(nn.Identity(), *own, None, samples=samples, context=ContextParallel(ranks, rank))

    threads = [threading.Thread(target=compute, args=(rank,), name=str(rank)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, output in enumerate(outputs):
        torch.testing.assert_close(output, part(whole, rank))
    loss = sum((output * part(weights, rank)).sum() for rank, output in enumerate(outputs))
    assert isinstance(loss, Tensor)
    for found, wanted in zip(torch.autograd.grad(loss, (query, key, value)), expected, strict=True):
        torch.testing.assert_close(found, wanted)
