"""Loss of each answer of prepared data under one checkpoint, with its images and with blank ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vlmpipe.trainer.audit.checkpoints import LossModel
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import SplitIndex
from vlmpipe.trainer.dataloading.batches import ImageSource, PackedBatch, cached_images, collate, online_images
from vlmpipe.trainer.evaluation.answer import GREY
from vlmpipe.trainer.models.image_inputs import Images
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.models.loss.pairs import PreferencePairs

Progressed = Callable[[int], None]  # number of samples done


@dataclass(frozen=True)
class AnswerLosses:
    """Losses of the answers of some samples of a split, in the order of `samples`.

    samples: (answers,) index of the sample in the split. answers: (answers,) index among the answers of its sample.
    nats: (answers,) sum over the answer's tokens. tokens: (answers,). missed: (answers,) tokens that are not the most
    probable ones after the tokens before them.
    """

    samples: NDArray[np.int64]
    answers: NDArray[np.int64]
    nats: NDArray[np.float32]
    tokens: NDArray[np.int32]
    missed: NDArray[np.int32]


def answer_losses(
    job: JobConfig,
    split: SplitIndex,
    model: LossModel,
    chosen: Sequence[int],
    *,
    is_blank: bool = False,
    progressed: Progressed = lambda _: None,
) -> AnswerLosses:
    """Losses of the answers of the chosen samples. is_blank: without what is in the images.

    Memory holds one packed sequence and some 28 bytes an answer.
    """
    features, form = model.readers.features, model.chat.form
    source = cached_images(features, job.model) if features else online_images(image_preparer(job.model))
    sampler = PackedBatchSampler(split, job.data, seed=0, global_batch_size=1, max_kept=form.max_kept)
    loader = PackedLoader(split, sampler, model.chat, model.readers.samples, images=features is None)
    parts: list[AnswerLosses] = []
    done = 0
    with torch.inference_mode():
        for samples in _packed(chosen, sampler):
            parts.append(_of_sequence(loader, blank(source) if is_blank else source, split, model, samples))
            done += len(samples)
            progressed(done)
    return joined(parts)


def _of_sequence(
    loader: PackedLoader, source: ImageSource, split: SplitIndex, model: LossModel, samples: list[int]
) -> AnswerLosses:
    ends = np.cumsum(split.label_tokens[samples], dtype=np.int64)
    first = {
        split.ids[sample]: int(end - split.label_tokens[sample]) for sample, end in zip(samples, ends, strict=True)
    }
    batch = collate([loader.pack_sequence(samples)], source, answers=first)
    assert batch.loss_sources is not None
    places, of_label = np.unique(batch.loss_sources.numpy(), return_inverse=True)  # of answers, by their first label
    nats, missed = _forward(model, batch, of_label.astype(np.int64), len(places))
    owners = np.searchsorted(ends, places, side="right")
    starts = np.searchsorted(owners, owners)  # first answer of each one's sample
    return AnswerLosses(
        np.array(samples, np.int64)[owners],
        np.arange(len(places)) - starts,
        nats,
        np.bincount(of_label, minlength=len(places)).astype(np.int32),
        missed,
    )


def _forward(
    model: LossModel, batch: PackedBatch, of_label: NDArray[np.int64], answers: int
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """(answers,) losses and missed tokens. of_label: (labels,) index of each label's answer."""
    noted: list[Tensor] = []
    grouped = replace(
        batch,
        pairs=PreferencePairs(torch.from_numpy(of_label), answers, None),  # without references: log probabilities
        loss_sources=torch.from_numpy(of_label),
    )
    model.loss.note_misses = lambda misses, _: noted.append(misses.cpu())
    try:
        log_probs = model.module(**grouped.to(model.device)).float().cpu()
    finally:
        model.loss.note_misses = None
    missed = np.bincount(of_label, weights=noted[0].numpy(), minlength=answers)
    return -log_probs.numpy(), missed.astype(np.int32)


def blank(source: ImageSource) -> ImageSource:
    """Images without content: features of zero, or pixels of mean grey."""

    def read(sequences: Sequence[object]) -> Images:
        images = source(sequences)  # type: ignore[arg-type]
        if isinstance(images.values, Tensor):
            return images._replace(values=torch.full_like(images.values, GREY))
        values = {
            name: torch.full_like(value, GREY) if name == "pixel_values" and isinstance(value, Tensor) else value
            for name, value in images.values.items()
        }
        return images._replace(values=values)

    return read


def _packed(chosen: Sequence[int], sampler: PackedBatchSampler) -> Iterator[list[int]]:
    """The samples in their order, as many in each sequence as fit."""
    members: list[int] = []
    for sample in chosen:
        if members and not sampler.fits([*members, sample]):
            yield members
            members = []
        members.append(sample)
    if members:
        yield members


def joined(parts: Sequence[AnswerLosses]) -> AnswerLosses:
    """Concatenate the losses of several lists of samples."""
    if not parts:
        empty = np.zeros(0, np.int64)
        return AnswerLosses(empty, empty, empty.astype(np.float32), empty.astype(np.int32), empty.astype(np.int32))
    return AnswerLosses(
        *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(AnswerLosses))
    )
