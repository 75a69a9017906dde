"""Mistakes of shared prefixes, each of which changes gradients."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from vlmpipe.trainer.dataloading.batches import PackedBatch
from vlmpipe.trainer.models.attention import merged_parts
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.kernels import Kernel, VarlenArgs
from vlmpipe.trainer.models.attention.merged_parts import Part

MERGED = merged_parts.with_parts


def no_gradient_of_log_sum_exps(kernel: Kernel, parts: list[Part]) -> Kernel:
    """Each kernel's backward pass gets its own output and log-sum-exp, with their shares as constants."""
    merged = MERGED(kernel, parts)

    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, _output: Tensor, lse: Tensor, args: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        def share(own: Tensor, whole: Tensor) -> Tensor:
            return (own - whole).exp().T.unsqueeze(-1)

        own, logs = kernel.forward(query, key, value, args)
        weighted = (gradient.flatten(0, 1) * share(logs, lse)).view(gradient.shape)
        found = kernel.backward(weighted, query, key, value, own, logs, args)
        for part in parts:
            inputs = part.inputs(query, key, value)
            own, logs = kernel.forward(*inputs, part.args(args.scale))
            at = gradient.flatten(0, 1)[part.queries] * share(logs, lse[:, part.queries])
            added = kernel.backward(at[None], *inputs, own, logs, part.args(args.scale))
            for whole, each, places in zip(found, added, (part.queries, part.keys, part.keys), strict=True):
                whole.flatten(0, 1).index_add_(0, places, each[0])
        return found

    return Kernel(merged.forward, backward)


def positions_run_on(batch: PackedBatch) -> PackedBatch:
    flat = batch.position_ids.clone().flatten()
    for start, end, stop in spans(batch):
        flat[end:stop] = torch.arange(end - start, stop - start)
    return dataclasses.replace(batch, position_ids=flat.view(batch.position_ids.shape))


def branches_see_each_other(batch: PackedBatch) -> PackedBatch:
    """As in one conversation about the image."""
    assert batch.samples
    inside = {place for _, end, stop in spans(batch) for place in range(end, stop)}
    merged = [(start, end) for start, end in batch.samples.bounds.tolist() if start < end and start not in inside]
    ends = {start: stop for start, _, stop in spans(batch)}
    lengths, length = [[], []], batch.input_ids.shape[1]  # type: ignore[var-annotated]
    for start, end in merged:
        lengths[start // length].append(ends.get(start, end) - start)
    samples = CuSeqlens.of(lengths[: len(batch.input_ids)], length)
    return dataclasses.replace(batch, samples=samples)


def mask_by_positions(batch: PackedBatch) -> PackedBatch:
    """As transformers finds packed samples: by positions that do not go on."""
    return dataclasses.replace(batch, samples=None)


def spans(batch: PackedBatch) -> list[tuple[int, int, int]]:
    assert batch.samples and batch.samples.prefixes is not None
    return [(start, end, stop) for start, end, stop in batch.samples.prefixes.tolist() if start < stop]
