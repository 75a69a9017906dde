"""The half of a training module that all families share: packed sequences in, summed token loss out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NotRequired, TypedDict, Unpack

import torch
from torch import Tensor, nn

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.varlen import block_diagonal_mask, use_varlen_attention
from vlmpipe.trainer.models.base import ShardingUnits
from vlmpipe.trainer.models.image_inputs import Grid, NamedImages
from vlmpipe.trainer.models.layers.image_placeholders import require_tokens
from vlmpipe.trainer.models.layers.selection_inputs import SelectionInputs
from vlmpipe.trainer.models.loss.chunked_loss import TokenLoss, loss_at_labels
from vlmpipe.trainer.models.loss.pairs import PreferencePairs
from vlmpipe.trainer.sizing.pipeline_partition import Stage


class PackedInputs(TypedDict):
    """Packed sequences as arguments of a training module. Named, and no object of a type: FSDP and DeepSpeed cast the
    tensors that they find among the arguments.
    """

    input_ids: Tensor  # (sequences, tokens)
    # (sequences, tokens), restarting at 0 for each packed sample; families whose images keep their aspect ratio take
    # (4, sequences, tokens): these, then the model's own three axes.
    position_ids: Tensor
    label_index: Tensor  # (labels,) positions in the flattened sequences whose *next* token is a label
    label_ids: Tensor  # (labels,) that token
    # Cached features, or pixel values; shapes: see `encode`, and `feature_shape` of the family. Of hf by name.
    images: Tensor | NamedImages
    image_grids: NotRequired[Sequence[Grid]]  # of each image, for patches
    samples: NotRequired[CuSeqlens]  # bounds of the packed samples; without, positions separate them
    image_tokens: NotRequired[int]  # of all images together
    pairs: NotRequired[PreferencePairs]  # of the samples; the loss is then that of pairs (see `TokenLoss`)
    selection: NotRequired[SelectionInputs]  # of the images, where the model selects their tokens
    loss_sources: NotRequired[Tensor]  # (labels,) or (pairs,) index of the source, where losses are told apart by it


class PackedVLM(nn.Module):
    """Training module that strategies wrap. Subclasses define `tower`, `tower_is_frozen`, `run_tower`, `project` and
    `embed`, and `drop_images`, which removes tower and projector.
    """

    def __init__(self, config: ModelConfig, model: nn.Module) -> None:
        super().__init__()
        self.config, self.model, self.token_loss = config, model, TokenLoss()
        self.why_masked = use_varlen_attention(self.language_model)

    @property
    def language_part(self) -> str:
        """The language model's name below `model.model`."""
        decoder = self.language_model
        return next(name for name, part in self.model.base_model.named_children() if part is decoder)

    @property
    def language_model(self) -> nn.Module:
        return self.model.get_decoder()

    @property
    def runs_frozen_tower(self) -> bool:
        return self.tower_is_frozen and self.tower is not None

    def train(self, mode: bool = True) -> PackedVLM:
        super().train(mode)
        if self.runs_frozen_tower:
            self.tower.eval()
        return self

    def forward(self, hidden: Tensor | None = None, **inputs: Unpack[PackedInputs]) -> Tensor:
        """Summed cross-entropy of the label tokens, a scalar in fp32. A pipeline stage without the head returns hidden
        states (sequences, tokens, hidden) instead.

        hidden: output of the previous pipeline stage, for a stage without the embedding. The projector also runs on 0
        images, so that every rank takes part in every collective. Raises DataError for another number of image tokens
        than `image_tokens`.
        """
        images = inputs["images"]
        levels: dict[str, object] = {}
        if hidden is None:
            assert isinstance(images, Tensor)
            features = images if self.tower is None else self.encode(images, inputs.get("image_grids"))
            projected = self.project(features)
            require_tokens(projected.shape[:-1].numel(), inputs.get("image_tokens"))
            hidden, levels = self.embed(inputs["input_ids"], projected)
        hidden = self.decode(hidden, inputs["position_ids"], inputs.get("samples"), **levels)
        return self.loss_of(self.model.lm_head, hidden, inputs)

    def loss_of(self, head: nn.Module | None, hidden: Tensor, inputs: PackedInputs) -> Tensor:
        """See `loss_at_labels`."""
        labels = inputs["label_index"], inputs["label_ids"]
        return loss_at_labels(self.token_loss, head, hidden, *labels, inputs.get("pairs"), inputs.get("loss_sources"))

    def decode(self, hidden: Tensor, position_ids: Tensor, samples: CuSeqlens | None, **more: object) -> Tensor:
        """(sequences, tokens, hidden) after the language model's layers, which keep samples apart.

        position_ids: see `PackedInputs`; of several axes, the first is that of samples. more: further arguments.
        """
        of_samples = position_ids if position_ids.ndim == 2 else position_ids[0]
        mask = block_diagonal_mask(self.language_model.config, of_samples, samples)
        output: Tensor = self.language_model(
            inputs_embeds=hidden, position_ids=position_ids, use_cache=False, **mask, **more
        ).last_hidden_state
        return output

    def encode(self, images: Tensor, image_grids: Sequence[Grid] | None = None) -> Tensor:
        """Tower features of pixel values, in bf16 when the tower is frozen.

        (images, 3, side, side) -> (images, tokens, tower_hidden), or with grids (patches, numbers) -> (tokens,
        levels x patches of a token x hidden).
        """
        with torch.set_grad_enabled(not self.tower_is_frozen and torch.is_grad_enabled()):
            features = self.run_tower(images, image_grids)
        return features.to(torch.bfloat16) if self.tower_is_frozen else features

    def reduce_to(self, stage: Stage) -> None:
        """Remove everything that is not in a pipeline stage.

        Layers keep their numbers, and so their names in checkpoints. Raises ConfigError for a language model that has
        no `norm`, or changes hidden states outside of it and its layers.
        """
        model, language_model = self.model, self.language_model
        layers, norm = language_model.layers, getattr(language_model, "norm", None)
        if norm is None:
            raise _unsplit(language_model, "its last norm has another name than `norm`")
        if getattr(model, "lm_head", None) is None:
            raise _unsplit(language_model, "the model's head has another name than `lm_head`")
        is_tied = model.lm_head.weight is language_model.embed_tokens.weight
        language_model.layers, language_model.norm = nn.ModuleList([Passage() for _ in layers]), Passage()
        _require_passage(language_model)
        for number in stage.layers:
            language_model.layers[number] = layers[number]
        if stage.is_last:
            language_model.norm = norm
        else:
            model.lm_head = None
        if not stage.is_first:
            self.drop_images()
            if not (stage.is_last and is_tied):  # a tied head needs the embedding's weight
                language_model.embed_tokens = None

    def view(self, stage: Stage) -> PackedVLM:
        """A new module that is `stage` alone and shares this one's weights."""
        view: PackedVLM = _shallow(self)
        part = self.language_part
        view.model = _shallow(self.model)
        view.model.model = _shallow(self.model.model)
        setattr(view.model.model, part, _shallow(getattr(self.model.model, part)))
        view.reduce_to(stage)
        return view

    def sharding_units(
        self, tower_layers: Sequence[nn.Module], *, image_layers: int = 0, shards_tower: bool = True
    ) -> ShardingUnits:
        return ShardingUnits(
            language_layers=list(self.language_model.layers),
            tower_layers=tower_layers,
            embedding=self.model.get_input_embeddings(),
            head=self.model.get_output_embeddings(),
            loss=self.token_loss,
            reduce_to=self.reduce_to,
            view=self.view,
            image_layers=image_layers,
            shards_tower=shards_tower,
        )


class Passage(nn.Module):
    """Replaces a layer or norm of another stage: returns hidden states unchanged."""

    def forward(self, hidden: Tensor, **_: object) -> Tensor:
        return hidden


def _shallow(module: nn.Module) -> nn.Module:
    """A copy with the same submodules and parameters, which can be replaced without changing `module`."""
    other = copy.copy(module)
    other._modules, other._parameters = dict(module._modules), dict(module._parameters)
    return other


@torch.no_grad()
def _require_passage(language_model: nn.Module) -> None:
    """Raise ConfigError unless hidden states pass unchanged without layers and norm: each stage runs the whole code."""
    hidden = torch.ones(1, 2, int(language_model.config.hidden_size))
    positions = torch.arange(2)[None]
    passed = language_model(inputs_embeds=hidden, position_ids=positions, use_cache=False).last_hidden_state
    if passed is not hidden or hidden._version:  # not by value: the planner traces fake tensors
        raise _unsplit(language_model, "it changes hidden states outside its layers")


def _unsplit(language_model: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        f"the language model {language_model.config.model_type!r} cannot be split into pipeline stages: {why}",
        fix="use another strategy, such as fsdp",
    )
