"""Training module of a model with grids of patches, whose language model gets selected visual tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from vlmpipe.trainer.config.arr_coc.channels import CHANNELS
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.features.relevance.allocation import Kept
from vlmpipe.trainer.features.relevance.module import (
    Relevance,
    RelevanceModule,
    answer_probabilities,
    policy_loss,
    pooled,
)
from vlmpipe.trainer.features.relevance.textures import image_of, textures_of
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.hf.encoder import encoder_of, merged_width
from vlmpipe.trainer.models.hf.model import HfVLM
from vlmpipe.trainer.models.image_inputs import Grid
from vlmpipe.trainer.models.layers.image_placeholders import places_of, require_tokens
from vlmpipe.trainer.models.layers.selection_inputs import SelectionInputs
from vlmpipe.trainer.models.loss.chunked_loss import loss_at_labels
from vlmpipe.trainer.models.loss.pairs import PreferencePairs
from vlmpipe.trainer.models.packed_vlm import PackedInputs

if TYPE_CHECKING:
    from transformers import BaseImageProcessor


class RelevanceVLM(HfVLM):
    """Qwen-VL with a relevance module. Features end with textures, one number for each of CHANNELS. See `PackedVLM`."""

    def __init__(self, config: ModelConfig, model: nn.Module, processor: object, *, cached: bool) -> None:
        super().__init__(config, model, None, cached=cached)
        self.processor = processor
        base = [parameter for name, parameter in model.named_parameters() if not name.startswith("relevance.")]
        self.base_trains = any(parameter.requires_grad for parameter in base)

    @property
    def relevance(self) -> RelevanceModule:
        return self.model.relevance

    def run_tower(self, patches: Tensor, grids: Sequence[Grid] | None) -> Tensor:
        assert grids is not None
        return with_textures(super().run_tower(patches, grids), patches, grids, self.processor)

    def forward(self, hidden: Tensor | None = None, **inputs: Unpack[PackedInputs]) -> Tensor:
        """Summed loss of the label tokens. In training with an estimator it is the mean over drawn selections, and its
        gradient is that of the policy, and of the base's trained weights.

        inputs: with `selection`, whose images have `slots` image tokens each in `input_ids`. See `PackedVLM`. There are
        no pairs and no pipeline stages.
        """
        packed, selection, images = Packed.of(inputs), inputs["selection"], inputs["images"]
        assert hidden is None and isinstance(images, Tensor)
        # First here, so last in the backward pass: the module's gradients are ready in the same order on every rank,
        # whatever images it has. ZeRO-2 sums them in that order.
        idle = self.relevance.idle()
        with torch.set_grad_enabled(self.base_trains and torch.is_grad_enabled()):
            features = images if self.tower is None else self.encode(images, inputs.get("image_grids"))
            require_tokens(len(features), inputs.get("image_tokens"))
            projected = self.project(features[:, : -len(CHANNELS)])
        relevances = self.relevance_of(packed.input_ids, features[:, -len(CHANNELS) :], selection)
        if not (self.training and self.relevance.config.learns):
            questions = question_ids(packed.input_ids, selection)
            selections = [
                self.relevance.select(relevance, grid, questions[sample])
                for relevance, grid, sample in zip(relevances, selection.grids, selection.image_samples, strict=True)
            ]
            return self.losses(packed, projected, selections).sum() + idle * self.training
        draws = [
            self.relevance.draw(relevance, grid, seed)
            for relevance, grid, seed in zip(relevances, selection.grids, selection.seeds, strict=True)
        ]
        count = self.relevance.config.samples
        with torch.set_grad_enabled(self.base_trains and torch.is_grad_enabled()):
            losses = torch.stack(
                [self.losses(packed, projected, [draw.kept[n] for draw in draws]) for n in range(count)]
            )  # (selections, labels)
        owners = torch.tensor(selection.image_samples, dtype=torch.int64, device=losses.device)
        tokens = torch.tensor([[len(selection) for selection in draw.kept] for draw in draws]).view(len(draws), count)
        log_probs = losses.new_zeros(count, selection.num_samples)
        if draws:
            log_probs = log_probs.index_add(1, owners, torch.stack([draw.log_probs for draw in draws], dim=1))
        costs = torch.zeros_like(log_probs.detach()).index_add(1, owners, tokens.T.to(losses))
        probabilities = answer_probabilities(losses.detach(), selection.label_samples, selection.num_samples)
        policy = policy_loss(log_probs, probabilities - self.relevance.config.token_cost * costs)
        policy = policy + idle
        return losses.mean(0).sum() + policy - policy.detach()

    def relevance_of(self, input_ids: Tensor, textures: Tensor, selection: SelectionInputs) -> list[Relevance]:
        """Return the relevance of each image. textures: (image tokens, channels)."""
        tokens = input_ids.flatten().index_select(0, selection.question_index)
        embeddings = self.model.get_input_embeddings()(tokens)
        questions = pooled(embeddings, selection.question_samples, selection.num_samples)
        return [
            self.relevance(image, questions[sample])
            for image, sample in zip(textures.split(sizes_of_images(selection)), selection.image_samples, strict=True)
        ]

    def losses(self, inputs: Packed, projected: Tensor, selections: Sequence[Kept]) -> Tensor:
        """Loss of each label token with these tokens of each image: (labels,).

        projected: (tokens, levels x hidden) of all images.
        """
        laid = inputs.with_kept(selections, int(self.model.config.image_token_id), padding=pad_id(self.model))
        of_images = projected.split(sizes_of_images(inputs.selection)) if selections else ()
        # Without images the projector's output stays in the graph: its weights have gradients on every rank.
        first = (
            torch.cat([selection.pool(of_image) for selection, of_image in zip(selections, of_images, strict=True)])
            if selections
            else projected
        )
        hidden, levels = self.embed(laid.input_ids, first)
        hidden = self.decode(hidden, laid.position_ids, laid.samples, **levels)
        each_token = PreferencePairs(torch.arange(len(laid.label_ids), device=hidden.device), len(laid.label_ids), None)
        token_losses = loss_at_labels(
            self.token_loss, self.model.lm_head, hidden, laid.label_index, laid.label_ids, each_token, laid.loss_sources
        )
        return -token_losses


class TracedVLM(HfVLM):
    """Stands for a RelevanceVLM where memory is traced with fake tensors, which have no relevance to select by.

    One of its selections is alive at a time, so that one pass has the memory of all.
    """

    def project(self, features: Tensor) -> Tensor:
        return super().project(features[:, : merged_width(encoder_of(self.model))])

    def forward(self, hidden: Tensor | None = None, **inputs: Unpack[PackedInputs]) -> Tensor:
        relevance = self.model.relevance
        base = [weight for name, weight in self.model.named_parameters() if not name.startswith("relevance.")]
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(weight.requires_grad for weight in base)):
            loss = super().forward(hidden, **inputs)
        return loss + relevance.idle() if relevance.config.learns else loss


@dataclass(frozen=True)
class Packed:
    """Packed sequences of one forward pass, whose images have all their slots."""

    input_ids: Tensor
    position_ids: Tensor
    label_index: Tensor
    label_ids: Tensor
    selection: SelectionInputs
    samples: CuSeqlens | None
    loss_sources: Tensor | None = None

    @classmethod
    def of(cls, inputs: PackedInputs) -> Packed:
        labels = inputs["label_index"], inputs["label_ids"]
        optional = inputs.get("samples"), inputs.get("loss_sources")
        return cls(inputs["input_ids"], inputs["position_ids"], *labels, inputs["selection"], *optional)

    def with_kept(self, selections: Sequence[Kept], image_token: int, padding: int) -> Packed:
        """Return the batch with kept tokens at their positions in the image's grid, without unused slots."""
        if not selections:
            return self
        selection, shape = self.selection, self.input_ids.shape
        slots = places_of(self.input_ids == image_token, sum(selection.slots))
        used = torch.from_numpy(
            np.concatenate(
                [
                    np.arange(most) < len(selection_of_image)
                    for selection_of_image, most in zip(selections, selection.slots, strict=True)
                ]
            )
        ).to(slots.device)
        places = slots[used]
        position_ids = self.position_ids.flatten(1).clone()  # (4, tokens)
        start = position_ids[1, places]  # the time of an image's tokens, from which height and width count
        rows_and_columns = torch.cat([selection_of_image.places for selection_of_image in selections])
        position_ids[2:, places] = start + rows_and_columns.T
        position_ids = position_ids.view(-1, *shape)
        if bool(used.all()):
            return replace(self, position_ids=position_ids)
        return self._without(slots[~used], position_ids, selections, padding)

    def _without(self, dropped: Tensor, position_ids: Tensor, selections: Sequence[Kept], padding: int) -> Packed:
        """Move the dropped tokens to the end of their sequences, as padding."""
        rows, length = self.input_ids.shape
        is_dropped = torch.zeros(rows * length, dtype=torch.bool, device=dropped.device)
        is_dropped[dropped] = True
        order = is_dropped.view(rows, length).long().argsort(dim=1, stable=True)
        moved_to = order.argsort(dim=1)
        input_ids = self.input_ids.flatten().masked_fill(is_dropped, padding).view(rows, length).gather(1, order)
        position_ids = position_ids.gather(2, order.expand(len(position_ids), -1, -1))
        sample_tokens = self.selection.sample_tokens_with(selections)
        document = np.concatenate(
            [np.arange(count) for row in sample_tokens for count in (*row, length - sum(row))]
        ).reshape(rows, length)
        position_ids[0] = torch.from_numpy(document).to(position_ids.device)
        label_index = moved_to.flatten()[self.label_index] + self.label_index // length * length
        samples = CuSeqlens.of(sample_tokens, length).to(self.input_ids.device)
        return replace(self, input_ids=input_ids, position_ids=position_ids, label_index=label_index, samples=samples)


def with_textures(features: Tensor, patches: Tensor, grids: Sequence[Grid], processor: BaseImageProcessor) -> Tensor:
    """Features (tokens, numbers) followed by the textures of their images. patches: see `image_of`."""
    side = int(processor.patch_size) * int(processor.merge_size)
    counts = [rows * columns for _, rows, columns in grids]
    with torch.no_grad():
        textures = [
            textures_of(image_of(of_image, grid, processor), side)
            for of_image, grid in zip(patches.split(counts), grids, strict=True)
        ]
    textures_of_all = torch.cat(textures) if textures else features.new_zeros(0, len(CHANNELS))
    return torch.cat([features, textures_of_all.to(features.dtype)], dim=1)


def sizes_of_images(selection: SelectionInputs) -> list[int]:
    return [rows * columns for rows, columns in selection.grids]


def question_ids(input_ids: Tensor, selection: SelectionInputs) -> list[list[int]]:
    """Tokens of each sample's question."""
    tokens = input_ids.flatten().index_select(0, selection.question_index).tolist()
    ids: list[list[int]] = [[] for _ in range(selection.num_samples)]
    for token, sample in zip(tokens, selection.question_samples.tolist(), strict=True):
        ids[sample].append(token)
    return ids


def pad_id(model: nn.Module) -> int:
    return int(model.config.text_config.pad_token_id or 0)
