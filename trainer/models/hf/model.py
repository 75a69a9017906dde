"""Training module of the family `hf`: packed samples through the library's own forward pass."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import TypeAlias, Unpack

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.merged_parts import image_blocks
from vlmpipe.trainer.models.attention.varlen import no_mask, takes_samples
from vlmpipe.trainer.models.hf.encoder import encoder_of, mergers_of, round_features, without_mergers
from vlmpipe.trainer.models.hf.encoder_output import PROJECTED_OUTPUTS, StoredEncoder, StoredOutput, projected_features
from vlmpipe.trainer.models.hf.grids import project, tower_output
from vlmpipe.trainer.models.hf.packed_samples import PackedSamples, separate_samples
from vlmpipe.trainer.models.hf.processor import BLANK, FEATURES, PIXEL_SHAPE, TYPES, PublishedImages, Tensors
from vlmpipe.trainer.models.hf.vision_attention import sizes_of, use_few_launches
from vlmpipe.trainer.models.image_inputs import Grid, NamedImages
from vlmpipe.trainer.models.layers.freeze import part_of, trains
from vlmpipe.trainer.models.layers.image_placeholders import add_levels_at_places, embedded, places_of, put
from vlmpipe.trainer.models.packed_vlm import PackedInputs, PackedVLM
from vlmpipe.trainer.sizing.pipeline_partition import Stage

ROPE_AXES = 3  # of positions: time, height and width
Nested: TypeAlias = "Tensor | Sequence[Nested]"
PROJECTED = "projected"  # in traces, in place of the model's inputs: (image tokens, hidden)


# Types whose library code makes masks, since tokens of an image see each other, and hands on those that it is given.
# True: in layers with windows only, where the language model's `use_bidirectional_attention` is "vision".
SEES_IMAGES = {"gemma3": False, "gemma4": True, "gemma4_unified": True}


class HfVLM(PackedVLM):
    """Training module that strategies wrap. model: the library's, which keeps its own forward pass.

    Samples are kept apart in the inputs of the language model, which the library's forward pass computes from all
    samples of a sequence together. stored: images are features that were encoded before; without the vision encoder.

    Without `images`, the loader knows the grids of images' patches, and gives positions of four axes: encoder, mergers
    and language model then run one by one, as in `PackedVLM`, and nothing waits for the device. Images are features
    with `cached`.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: PreTrainedModel,
        images: PublishedImages | None,
        stored: StoredOutput | None = None,
        *,
        cached: bool = False,
    ) -> None:
        super().__init__(config, model)
        self._images, encoder = images, encoder_of(model)
        self.features_of = inspect.signature(model.base_model.get_image_features).parameters
        self.packed, self.is_stage, self.has_images = PackedSamples(why_masked=self.why_masked), False, True
        self.language_model.register_forward_pre_hook(separate_samples(self.packed), with_kwargs=True)
        self.tower_is_frozen = not trains(without_mergers(encoder))
        # Replaced in traces with fake tensors; the second is there for them.
        self.sizes_of, self.encoded = sizes_of, lambda projected: projected
        if images is None and len(mergers_of(encoder)) > 1:
            add_levels_at_places(self.language_model)
        # In a list because it is no submodule: its parts already belong to the encoder, under their names in files.
        self._tower: list[nn.Module] = []
        if stored or cached:
            model.set_encoder(StoredEncoder(encoder, stored), modality="image")
        else:
            use_few_launches(encoder)
            if images is None:
                self._tower = [without_mergers(encoder)]
            elif self.tower_is_frozen:
                round_features(encoder)
        self.train(self.training)

    @property
    def knows_grids(self) -> bool:
        """Return whether the loader knows the grids of images' patches."""
        return self._images is None

    @functools.cached_property
    def _blank(self) -> NamedImages:
        """Inputs of one image, which stands in where there is none."""
        if isinstance(encoder := encoder_of(self.model), StoredEncoder):
            stored = encoder.stored
            assert stored is not None
            return self._published.encoded(torch.zeros(stored.blank_rows, stored.width), [BLANK])
        return self._published.tensors([Image.new("RGB", BLANK)])

    @property
    def _published(self) -> PublishedImages:
        assert self._images is not None, "the loader does not know the grids of images' patches"
        return self._images

    @property
    def masked(self) -> str:
        """Why samples are kept apart by a mask; empty where they are not."""
        return self.packed.why_masked

    @property
    def sees_images(self) -> bool:
        """Return whether tokens of an image see each other."""
        return self.model.config.model_type in SEES_IMAGES

    @property
    def tower(self) -> nn.Module | None:
        """The vision encoder, in some models with mergers, which are projectors. None with cached features, and in
        later pipeline stages."""
        encoder = encoder_of(self.model) if self.has_images else None
        return None if isinstance(encoder, StoredEncoder) else encoder

    def drop_images(self) -> None:
        base, language_part = self.model.base_model, self.language_part
        for name, _ in [*base.named_children(), *base.named_parameters(recurse=False)]:
            if name != language_part:
                setattr(base, name, None)
        self.has_images, self._tower = False, []

    def reduce_to(self, stage: Stage) -> None:
        """Remove everything that is not in a pipeline stage.

        Raises ConfigError for a model whose first stage alone would know which tokens see each other.
        """
        why = f"attention computes scores between samples, under a mask ({self.masked})" if self.masked else ""
        if self.sees_images:
            why = "tokens of an image see each other"
        if why:
            raise ConfigError(
                f"a {self.model.config.model_type} model cannot be split into pipeline stages: {why}",
                fix="use another strategy, such as fsdp",
            )
        if stage.is_first and not stage.is_last:
            self.packed.layers = max(len(stage.layers), 1)
        self.is_stage = True
        super().reduce_to(stage)

    def train(self, mode: bool = True) -> HfVLM:
        super().train(mode)
        if self.runs_frozen_tower:
            for merger in mergers_of(self.tower):
                merger.train(mode)
        return self

    def run_tower(self, patches: Tensor, grids: Sequence[Grid] | None) -> Tensor:
        assert grids is not None
        (tower,) = self._tower
        if len(grids):
            return tower_output(tower, patches, self.sizes_of(tower, grids, patches.device))
        # Encode one blank token and drop its features: towers cannot reshape an empty batch, and a trained tower must
        # take part in its collectives on every rank.
        side = int(tower.config.spatial_merge_size)
        patches, blank = patches.new_zeros(side**2, patches.shape[1]), [(1, side, side)]
        return tower_output(tower, patches, self.sizes_of(tower, blank, patches.device))[:0]

    def project(self, features: Tensor) -> Tensor:
        return project(encoder_of(self.model), features)

    def embed(self, input_ids: Tensor, projected: Tensor) -> tuple[Tensor, dict[str, object]]:
        """(sequences, tokens, hidden), and the language model's arguments for deeper levels (DeepStack)."""
        first, *deeper = projected.chunk(len(mergers_of(encoder_of(self.model))), dim=-1)
        config = self.model.config
        is_seen = (input_ids == config.image_token_id) | (input_ids == config.video_token_id)
        places = places_of(is_seen, len(projected))
        hidden = put(self.model.get_input_embeddings()(input_ids), places, first)
        return hidden, {"visual_pos_masks": places, "deepstack_visual_embeds": deeper} if deeper else {}

    def forward(self, hidden: Tensor | None = None, **inputs: Unpack[PackedInputs]) -> Tensor:
        """Summed cross-entropy of the label tokens, a scalar in fp32. See `trainer.models.packed_vlm.PackedVLM`.

        images: inputs of the library's model by name, or what `PublishedImages.encoded` says; none without images.
        """
        if self.knows_grids:
            return super().forward(hidden, **inputs)
        images = inputs["images"]
        assert not isinstance(images, Tensor)
        positions, samples = inputs["position_ids"], inputs.get("samples")
        if hidden is None:
            hidden = self.hidden_states(inputs["input_ids"], positions, images, samples)
        else:
            hidden = self._continued(hidden, inputs["input_ids"], positions, images, samples)
        # Without an embedding, as in later stages, the library says that there is no head either.
        head = self.model.lm_head if self.is_stage else self.model.get_output_embeddings()
        return self.loss_of(head, hidden, inputs)

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, images: NamedImages, samples: CuSeqlens | None = None
    ) -> Tensor:
        """(sequences, tokens, hidden) after the language model.

        Without images, the library's forward pass gets a blank one, of whose features no token takes any. So each rank
        runs the same modules in the same order, and the first layer's input needs a gradient wherever features do: the
        collectives of all ranks are the same whatever their data.
        """
        if PROJECTED in images:
            projected = images[PROJECTED]
            assert isinstance(projected, Tensor)
            return self._traced(input_ids, position_ids, projected, samples)
        types = self._published.types(input_ids)
        inputs = self._replayed(images or self._blank)
        positions = self._positions(input_ids, position_ids, inputs if images else {}, samples)
        masks = self._masks_of_blocks(input_ids) if samples is not None else None
        if masks is not None and samples is not None and self._blocks is not None:
            is_image = (input_ids == self._published.image_token_id).cpu()
            samples = image_blocks(is_image, samples, windows_only=self._blocks) if images else samples
        self.packed.positions, self.packed.samples, self.packed.masks = position_ids, samples, masks
        try:
            with contextlib.nullcontext() if images else _without_features(self.model.base_model):
                hidden: Tensor = self.model.base_model(
                    input_ids=input_ids,
                    position_ids=positions,
                    attention_mask=torch.ones_like(input_ids) if masks is None else masks,
                    use_cache=False,
                    **types,
                    **{name: value.to(input_ids.device) for name, value in inputs.items()},
                ).last_hidden_state
        finally:
            self.packed.positions = self.packed.samples = self.packed.masks = None
        return hidden

    def _continued(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        position_ids: Tensor,
        images: NamedImages,
        samples: CuSeqlens | None,
    ) -> Tensor:
        """(sequences, tokens, hidden) after this pipeline stage's layers."""
        tensors = {name: value for name, value in images.items() if isinstance(value, Tensor)}
        return self.decode(hidden, self._positions(input_ids, position_ids, tensors, samples), samples)

    def _traced(self, input_ids: Tensor, position_ids: Tensor, projected: Tensor, samples: CuSeqlens | None) -> Tensor:
        """For traces with fake tensors, which have no values that the library's forward pass asks for: the language
        model alone, after images that are projected already."""
        trained = [p for name, p in self.named_parameters() if p.requires_grad and part_of(name) == "projector"]
        first = sum((p.flatten()[0] for p in trained), start=projected.new_zeros(()))
        hidden = embedded(self.model, input_ids, self.encoded(projected + first))
        positions = self._positions(input_ids, position_ids, {PROJECTED: projected}, samples)
        more = {}
        if width := getattr(self.language_model.config, "hidden_size_per_layer_input", 0):
            shape = (*input_ids.shape, len(self.language_model.layers), width)
            more["per_layer_inputs"] = hidden.new_zeros(shape)
        return self.decode(hidden, positions, samples, **more)

    def _masks_of_blocks(self, input_ids: Tensor) -> dict[str, Tensor] | None:
        """Empty masks for each kind of layer, which keep the library from making whole ones for its image tokens."""
        config = self.language_model.config
        if self.model.config.model_type not in SEES_IMAGES or not takes_samples(config):
            return None
        return dict.fromkeys(config.layer_types, no_mask(len(input_ids), input_ids.device))

    @functools.cached_property
    def _blocks(self) -> bool | None:
        """True where tokens of an image see each other in layers with windows only; None if they never do."""
        windows_only = SEES_IMAGES[self.model.config.model_type]
        bidirectional = self.language_model.config.use_bidirectional_attention
        return None if windows_only and bidirectional != "vision" else windows_only

    def _replayed(self, images: NamedImages) -> Tensors:
        """Inputs of the library's model. The encoder has the stored features, if there are any, and sees no pixels."""
        rest = {name: value for name, value in images.items() if isinstance(value, Tensor)}
        if FEATURES not in images:
            return rest
        rows, shape = rest.pop(FEATURES), images[PIXEL_SHAPE]
        assert isinstance(shape, tuple)
        embedding = self.model.get_input_embeddings().weight
        encoder_of(self.model).rows = rows.to(embedding.device, embedding.dtype)
        return rest | {"pixel_values": rows.new_ones(()).expand(shape)}  # some models take out images that are all 0

    def features(self, inputs: Tensors) -> list[Tensor]:
        """Return projected image features. inputs: those named in `features_of`."""
        return projected_features(self.model, inputs)

    def _positions(self, input_ids: Tensor, position_ids: Tensor, images: Tensors, samples: CuSeqlens | None) -> Tensor:
        """The language model's positions. images: inputs of the images in the sequences."""
        if not hasattr(self.model.base_model, "get_rope_index"):
            return position_ids
        if PROJECTED in images:  # in a trace
            return position_ids.repeat(4, 1, 1)
        return self._rope_positions(input_ids, position_ids, self._published.types(input_ids) | images, samples)

    def _rope_positions(
        self, input_ids: Tensor, position_ids: Tensor, inputs: Tensors, samples: CuSeqlens | None
    ) -> Tensor:
        """(4, sequences, tokens): positions in the sample, then the model's own three axes."""
        assert samples is not None, "these positions need the bounds of samples"
        runs = samples.runs()
        bounds = [(run.start, run.end) for run in runs if run.after is None]
        longest = max((end - start for start, end in bounds), default=0)
        places = position_ids.flatten().repeat(4, 1)
        if longest:
            index = torch.tensor([start for start, _ in bounds])[:, None] + torch.arange(longest)
            inside = index < torch.tensor([end for _, end in bounds])[:, None]
            index, inside = (index * inside).to(input_ids.device), inside.to(input_ids.device)
            by_token = {"input_ids": input_ids} | {name: inputs[name] for name in TYPES if name in inputs}
            rows = {name: value.flatten()[index] * inside for name, value in by_token.items()}
            takes = inspect.signature(self.model.base_model.get_rope_index).parameters
            values = {name: value for name, value in (inputs | rows).items() if name in takes}
            ropes, _ = self.model.base_model.get_rope_index(**values, attention_mask=inside.long())
            if len(ropes) != ROPE_AXES:
                kind = self.model.config.model_type
                raise ConfigError(f"positions of a {kind} model have {len(ropes)} axes", expected=f"{ROPE_AXES} axes")
            places[1:, index[inside]] = ropes[:, inside].to(places)
            for run in runs:
                if run.after is not None:  # text after a prefix, as that of the first sample that has it
                    further = torch.arange(run.end - run.start, device=places.device)
                    places[1:, run.start : run.end] = places[1:, run.after, None] + further
        return places.view(4, *input_ids.shape)


@contextlib.contextmanager
def _without_features(model: PreTrainedModel) -> Iterator[None]:
    """Have a model encode and project the images that it is given, and use none of the features."""
    features_of = model.get_image_features

    def get_image_features(*args: object, **named: object) -> ModelOutput:
        output = features_of(*args, **named)
        for name in PROJECTED_OUTPUTS:
            if output.get(name) is not None:
                output[name] = _none_of(output[name])
        return output

    model.get_image_features = get_image_features
    try:
        yield
    finally:
        del model.get_image_features


def _none_of(features: Nested) -> Nested:
    return features[:0] if isinstance(features, Tensor) else [_none_of(feature) for feature in features]
