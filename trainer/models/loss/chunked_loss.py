"""Token loss of a training module, computed in chunks of label tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from vlmpipe.trainer.models.loss.pairs import PairLoss, PreferencePairs, log_probabilities

TRAINED_ROWS = "trained_rows"  # buffer of an embedding and a head: (tokens,)


class TokenLoss(nn.Module):
    """Summed cross-entropy of label tokens, or the loss of pairs, a scalar in fp32.

    chunk_tokens: label tokens that have logits at a time (see `compute_in_chunks`); 0 means all.
    pair_loss: of the run; None where only log probabilities are asked for.
    note_terms: gets the losses of tokens or pairs and the index of each one's source, in training; None with a single
        source.
    note_misses: gets whether each label is another token than the most probable one, and the index of its source, where
        there are no gradients. With chunks only.
    added_loss: a further loss in training, times the number of labels or pairs that it gets.
    """

    chunk_tokens = 0

    def __init__(self) -> None:
        super().__init__()
        self.pair_loss: PairLoss | None = None
        self.note_terms: Callable[[Tensor, Tensor], None] | None = None
        self.note_misses: Callable[[Tensor, Tensor], None] | None = None
        self.added_loss: Callable[[int], Tensor] | None = None
        self.of_logits = functools.partial(F.cross_entropy, reduction="none")  # replaced where ranks share a vocabulary

    def forward(
        self,
        head: nn.Module,
        hidden: Tensor,
        label_ids: Tensor,
        pairs: PreferencePairs | None = None,
        sources: Tensor | None = None,
    ) -> Tensor:
        """hidden: (labels, hidden), of label positions only. label_ids: (labels,). sources: (labels,), or of each pair.

        Of pairs without references, their log probabilities instead.
        """
        if self.chunk_tokens:
            terms, misses = head(hidden, label_ids)  # (labels,), (labels,) or nothing
            if self.note_misses and sources is not None and not self.training:
                self.note_misses(misses, sources)
        else:
            terms = self.of_logits(head(hidden).float(), label_ids)
        # Sequences of padding have no references that lack.
        gives_loss = pairs is None or (pairs.references is not None and self.pair_loss is not None)
        if pairs is not None and gives_loss:
            assert self.pair_loss is not None
            terms = self.pair_loss(terms, pairs)  # (pairs,)
        if self.note_terms and sources is not None and self.training:
            self.note_terms(terms, sources)
        if pairs is not None and not gives_loss:
            return log_probabilities(terms, pairs)
        if self.added_loss and self.training:
            return terms.sum() + self.added_loss(len(terms))
        return terms.sum()


def loss_at_labels(
    loss: TokenLoss,
    head: nn.Module | None,
    hidden: Tensor,
    label_index: Tensor,
    label_ids: Tensor,
    pairs: PreferencePairs | None = None,
    sources: Tensor | None = None,
) -> Tensor:
    """Summed loss of the label tokens; without a head, `hidden` for the next pipeline stage.

    hidden: (sequences, tokens, hidden). label_index: (labels,), positions in the flattened sequences. label_ids:
    (labels,). pairs, sources: see `TokenLoss`.
    """
    if head is None:
        return hidden
    # Only label positions go through the head: logits of all tokens would not fit.
    labelled = hidden.flatten(0, 1).index_select(0, label_index)  # (labels, hidden)
    summed: Tensor = loss(head, labelled, label_ids, pairs, sources)
    return summed


def compute_in_chunks(loss: TokenLoss, head: nn.Module, chunk_tokens: int) -> None:
    """Have the head itself compute the losses from hidden states, a chunk of logits at a time.

    The head does it because strategies gather the head's weight only while the head runs.
    """

    def forward(layer: nn.Module, hidden: Tensor, label_ids: Tensor) -> tuple[Tensor, Tensor]:
        return chunked_losses(hidden, layer.weight, label_ids, chunk_tokens, rows=trained_rows_of(layer))

    loss.chunk_tokens = chunk_tokens
    head.forward = functools.partial(forward, head)


def chunked_losses(
    hidden: Tensor,
    weight: Tensor,
    label_ids: Tensor,
    chunk_tokens: int,
    *,
    first: int = 0,
    group: ProcessGroup | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of `hidden @ weight.T` at each label, computed for at most `chunk_tokens` labels at a time; and,
    where there are no gradients, whether another token than the label is more probable, else nothing.

    hidden: (labels, hidden). weight: (vocabulary, hidden); if the ranks of `group` share the vocabulary, this rank's
    part of it, from token `first` on. label_ids: (labels,). Each rank returns the whole losses, and its part's
    gradients. rows: tokens whose rows of the weight have gradients, the others' are 0; None: all.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    misses = label_ids.new_empty(0 if torch.is_grad_enabled() else len(label_ids), dtype=torch.bool)
    losses: Tensor = _ChunkedLosses.apply(hidden, weight, label_ids, chunk_tokens, dtype, first, group, rows, misses)
    return losses, misses


class _LossContext(FunctionCtx):
    """Values saved for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    probabilities: Tensor | None  # of the last chunk
    size: int
    dtype: torch.dtype
    first: int
    rows: Tensor | None


class _ChunkedLosses(torch.autograd.Function):
    """Computes logits in `dtype` and everything else in fp32.

    The backward pass recomputes the logits of all chunks but the last, with which it begins. It reuses each label's
    log-sum-exp of the forward pass, so that ranks do not communicate again. It saves the weight itself, not its copy in
    `dtype`: strategies free gathered weights between the passes and gather them again.
    """

    @staticmethod
    def forward(
        ctx: _LossContext,
        hidden: Tensor,
        weight: Tensor,
        label_ids: Tensor,
        chunk_tokens: int,
        dtype: torch.dtype,
        first: int,
        group: ProcessGroup | None,
        rows: Tensor | None,
        misses: Tensor,
    ) -> Tensor:
        chunks = max(1, -(-len(hidden) // chunk_tokens))  # the fewest, of equal size
        size = max(1, -(-len(hidden) // chunks))
        losses, log_sums = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(2))
        scores = sums = hidden.new_empty(0)
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = weight.to(dtype)
            for start in _starts(hidden, size):
                chunk, labels = hidden[start : start + size], label_ids[start : start + size]
                del scores  # before those of this chunk are allocated
                scores = F.linear(chunk.to(dtype), matrix).float()  # (chunk, tokens of this rank)
                largest = scores.amax(dim=-1)
                if group:
                    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
                scores -= largest.unsqueeze(1)
                columns, is_mine = on_this_rank(labels, first, len(weight))
                requested = scores.gather(1, columns.unsqueeze(1)).squeeze(1) * is_mine
                sums = torch.stack([scores.exp_().sum(dim=-1), requested])
                if group:
                    dist.all_reduce(sums, group=group)
                losses[start : start + size] = sums[0].log() - sums[1]
                if len(misses):
                    misses[start : start + size] = sums[1] < 0  # the largest score is 0
                log_sums[start : start + size] = sums[0].log() + largest
        ctx.save_for_backward(hidden, weight, label_ids, log_sums)
        ctx.probabilities = scores.div_(sums[0].unsqueeze(1))  # of the last chunk
        ctx.size, ctx.dtype, ctx.first, ctx.rows = size, dtype, first, rows
        return losses

    @staticmethod
    def backward(ctx: _LossContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, label_ids, log_sums = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        matrix, size = weight.to(ctx.dtype), ctx.size
        probabilities, ctx.probabilities = ctx.probabilities, None
        for start in reversed(_starts(hidden, size)):
            chunk, labels = hidden[start : start + size].to(ctx.dtype), label_ids[start : start + size]
            if probabilities is None:
                logits = F.linear(chunk, matrix).float()
                probabilities = logits.sub_(log_sums[start : start + size].unsqueeze(1)).exp_()
                del logits
            columns, is_mine = on_this_rank(labels, ctx.first, len(weight))
            probabilities[torch.arange(len(columns), device=columns.device), columns] -= is_mine.float()
            of_losses = gradients[0][start : start + size].unsqueeze(1)
            d_logits = probabilities.mul_(of_losses).to(ctx.dtype)  # (chunk, tokens of this rank)
            probabilities = None
            if d_hidden is not None:
                d_hidden[start : start + size] = d_logits @ matrix
            if d_weight is not None:
                _add_product(d_weight, d_logits.t(), chunk)
            del d_logits
        if d_weight is not None and ctx.rows is not None:
            index, is_mine = on_this_rank(ctx.rows, ctx.first, len(weight))
            d_weight *= d_weight.new_zeros(len(weight)).index_add_(0, index, is_mine.float()).ne(0).unsqueeze(1)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), *[None] * 7


def trained_rows_of(layer: nn.Module) -> Tensor | None:
    """Tokens whose rows in an embedding or a head are all that is trained of it (`model.lora.train_tokens`)."""
    rows: Tensor | None = getattr(layer, TRAINED_ROWS, None)
    return rows


def _starts(hidden: Tensor, size: int) -> range:
    """First label of each chunk; in a trace of memory of the last three only, as all hold the same."""
    starts = range(0, max(1, len(hidden)), size)
    return starts[-3:] if isinstance(hidden, FakeTensor) else starts


def on_this_rank(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Index of each token among the `count` from `first` on, clamped into range, and whether it is one of them."""
    index = tokens - first
    return index.clamp(0, count - 1), (index >= 0) & (index < count)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, which is always fp32: a sum of many chunks in bf16 would lose digits."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
