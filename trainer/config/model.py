"""The run file's `model` section: where the parts of the model come from, and which of them are trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from vlmpipe.trainer.config.arr_coc.relevance import RelevanceConfig
from vlmpipe.trainer.config.base import OfFeature, Positive, Section, StorageUri
from vlmpipe.trainer.config.weights.lora import LoraConfig
from vlmpipe.trainer.config.weights.origin import PARTS, ModelPart, WeightsConfig
from vlmpipe.trainer.secret_manager import SECRET_NAME

# Families whose tower and language model come together: `model.pretrained` is where both are from.
WHOLE_FAMILIES = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "hf")
# Families whose images keep their shape, and so differ in tokens; those of the others are resized to one square. Model
# types of which family hf takes images so, too, with max_pixels.
GRID_FAMILIES = ("qwen2_5_vl", "qwen3_vl")
GRID_TYPES = ("qwen2_vl", *GRID_FAMILIES, "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
# Families whose code and image processor are transformers' own and are examined before training; those of any type.
PUBLISHED_FAMILIES, ANY_TYPE_FAMILIES = ("smolvlm", "hf"), ("hf",)
# Of their images: the longer side to the shorter one. transformers refuses to resize what is longer.
MAX_ASPECT = 200.0
# Of an image that is cut into tiles. transformers makes none larger.
MAX_LONGEST_EDGE = 4096
# How images become tokens: as squares of one side, as grids of patches, or as the published image processor says.
ImageKind = Literal["squares", "grids", "published"]
Pattern = Annotated[str, Field(min_length=1)]


IMAGE_TOKEN = "<image>"  # an image's mark in data, and the image token of most tokenizers
IMAGE_PAD = "<|image_pad|>"  # image token of the Qwen-VL models' tokenizers


def _parts_of_llava_only(schema: dict[str, Any]) -> None:
    """Leave tower and language_model optional in the JSON Schema: the family decides whether they are required."""
    schema["required"] = [name for name in schema["required"] if name not in ("tower", "language_model")]


class ModelConfig(Section):
    """The vision-language model: a tower, a projector and a language model."""

    model_config = ConfigDict(json_schema_extra=_parts_of_llava_only)

    family: Literal["llava", "qwen2_5_vl", "qwen3_vl", "smolvlm", "hf"] = Field(
        "llava",
        description="Model family. llava joins any tower and any language_model; the others are whole models, hf any "
        "published image-text model of transformers, the rest names for hf with one type and fields of their own.",
    )
    pretrained: WeightsConfig | None = Field(
        None, description="The whole model, instead of tower, projector and language_model; null for models from parts."
    )
    tower: WeightsConfig = Field(description="Vision encoder, also that of a whole LLaVA. For llava.")
    projector: WeightsConfig | None = Field(
        None, description="LLaVA whose projector is used; null initializes a new one. For llava."
    )
    language_model: WeightsConfig = Field(description="Causal language model, also that of a whole LLaVA. For llava.")
    tokenizer: StorageUri = Field(
        min_length=1,
        description="Tokenizer: a hub id, a folder, gs://bucket/folder, run:RUN_ID, or train:N to train a byte-level "
        "BPE of N entries on the first 200,000 training samples.",
    )
    tokenizer_revision: str = Field(
        "",
        description="Commit of the tokenizer's hub repository; empty takes the revision of weights from the same "
        "address, and without one the newest.",
    )
    hub_token_secret: str | None = Field(
        None,
        pattern=rf"^{SECRET_NAME}$",
        description="Secret Manager secret with a Hugging Face token for gated and private repositories, "
        "projects/PROJECT/secrets/NAME; null uses HF_TOKEN or an existing login.",
    )
    feature_layer: int = Field(
        -1, description="Hidden state of the tower that feeds the projector; -1 is the last layer's."
    )
    feature_select: Literal["full", "drop_cls"] = Field(
        "full",
        description="full keeps every tower token; drop_cls drops the first (the class token of CLIP and DINOv2).",
    )
    image_size: int = Field(
        0,
        ge=0,
        description="Side of the square that images are resized to, in pixels. For llava and smolvlm, which need it.",
    )
    longest_edge: Positive | None = Field(
        None,
        description="Longer side in pixels to which images are resized before they are cut into tiles of image_size, "
        "with one more of the whole; null makes each image one tile. For smolvlm.",
    )
    min_pixels: Positive | None = Field(
        None,
        description="Approximate minimum pixels of an image; smaller images are enlarged. With max_pixels.",
    )
    max_pixels: Positive | None = Field(
        None,
        description="Approximate maximum pixels of an image, which bounds its tokens; larger images are reduced. For "
        "the Qwen-VL families, which need it, and for hf with a Qwen type, whose images are then taken as theirs.",
    )
    image_processor: dict[str, object] | None = Field(
        None,
        description="Changed settings of the published image processor, such as max_patches or size, which bound the "
        "tokens of an image; null changes none. For hf.",
    )
    freeze: tuple[ModelPart, ...] = Field(
        ("tower",), description="Parts whose weights are not trained. Feature caching needs a frozen tower."
    )
    freeze_parameters: tuple[Pattern, ...] = Field(
        (),
        description="Parameters that are not trained, in addition to the parts in freeze: shell patterns over the "
        "names in the exported model (such as *.embed_tokens.* or *language_model.layers.[0-9].*).",
    )
    train_parameters: tuple[Pattern, ...] = Field(
        (),
        description="Parameters that are trained although freeze or freeze_parameters name them: the same patterns. "
        "With trained parameters of the tower, set features.cache to off.",
    )
    lora: LoraConfig | None = Field(
        None,
        description="Adapters to train instead of a part's own weights; null trains the weights themselves (full "
        "fine-tuning).",
    )
    relevance: Annotated[RelevanceConfig | None, OfFeature("relevance")] = Field(
        None,
        description="Selection of visual tokens for the language model (ARR-COC); null passes all of them. For the "
        "Qwen-VL families.",
    )
    seed: int = Field(0, description="Seed of randomly initialized weights.")

    @model_validator(mode="before")
    @classmethod
    def _whole_is_both(cls, content: object) -> object:
        """A whole model is where all its parts come from."""
        if not isinstance(content, dict):
            return content
        family, pretrained = content.get("family", "llava"), content.get("pretrained")
        if family == "llava":
            return _llava_parts(content, pretrained)
        if family not in WHOLE_FAMILIES:
            return content
        if pretrained is None:
            raise ValueError(f"family {family} needs pretrained, with weights or config: its parts come together")
        if parts := [name for name in PARTS if content.get(name) is not None]:
            raise ValueError(
                f"family {family} has no {' and no '.join(parts)} of its own: pretrained is where both are from"
            )
        if family == "smolvlm" and "do_image_splitting" in content:
            raise ValueError(
                "do_image_splitting is no field: each image is one tile, the square of image_size, unless longest_edge "
                "says how large it is made before it is cut into such tiles"
            )
        return {**content, "tower": pretrained, "language_model": pretrained}

    @model_serializer(mode="wrap")
    def _as_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        content: dict[str, object] = dump(self)
        return {name: value for name, value in content.items() if not (self.pretrained and name in PARTS)}

    @model_validator(mode="after")
    def _fits_the_family(self) -> ModelConfig:
        if self.is_of_any_type:
            _require_published(self)
            return self
        if self.image_processor is not None:
            raise ValueError(f"image_processor does not apply to family {self.family}: it is for family hf")
        if self.family in GRID_FAMILIES:
            if unfit := sorted(
                {"image_size", "longest_edge", "feature_layer", "feature_select"} & changed_fields(self)
            ):
                raise ValueError(
                    f"{unfit[0]} does not apply to family {self.family}: images keep their shape between min_pixels "
                    "and max_pixels, and the model says which features it takes"
                )
            if self.max_pixels is None:
                raise ValueError(
                    f"family {self.family} needs max_pixels, such as 1003520: it bounds the tokens of an image"
                )
            _require_bounds(self)
            return self
        alien, fields = {"longest_edge"}, "pretrained or its parts, and image_size"
        if self.family in WHOLE_FAMILIES:
            alien, fields = {"feature_layer", "feature_select"}, "pretrained, image_size, longest_edge"
        if unfit := sorted({"min_pixels", "max_pixels", *alien} & changed_fields(self)):
            raise ValueError(f"{unfit[0]} does not apply to family {self.family}, which has {fields}")
        if not self.image_size:
            raise ValueError(
                f"family {self.family} needs image_size: the side in pixels that its tower was trained with"
            )
        if (edge := self.longest_edge) and (edge % self.image_size or not self.image_size < edge <= MAX_LONGEST_EDGE):
            raise ValueError(
                f"longest_edge {edge} is not cut into tiles of image_size {self.image_size}: it must be a multiple "
                f"of that, twice it at least and {MAX_LONGEST_EDGE} at most"
            )
        return self

    @model_validator(mode="after")
    def _fits_the_adapters(self) -> ModelConfig:
        if not self.lora:
            return self
        if twice := [part for part in self.lora.parts if part in self.freeze]:
            raise ValueError(
                f"lora freezes the {twice[0].replace('_', ' ')} already: take {twice[0]} out of freeze, or out of "
                "lora.parts"
            )
        if self.lora.quantize_base and self.lora.parts != ("language_model",):
            raise ValueError("lora.quantize_base is for adapters of the language model: leave lora.parts out")
        if self.lora.quantize_base and self.lora.use_dora:
            raise ValueError("lora.use_dora needs the weights that quantize_base stores in 4 bits: leave one out")
        if self.lora.train_tokens and (self.lora.quantize_base or self.lora.pretrained):
            other = "quantize_base" if self.lora.quantize_base else "pretrained"
            raise ValueError(f"lora.train_tokens does not work with lora.{other}: leave one out")
        return self

    @model_validator(mode="after")
    def _fits_the_tokenizer(self) -> ModelConfig:
        if self.tokenizer_revision and self.tokenizer.startswith("train:"):
            raise ValueError(f"tokenizer_revision does not apply to tokenizer {self.tokenizer}, which is trained")
        return self

    @model_validator(mode="after")
    def _fits_the_relevance(self) -> ModelConfig:
        if not self.relevance:
            return self
        if self.family not in GRID_FAMILIES:
            raise ValueError(f"relevance does not apply to family {self.family}: use {' or '.join(GRID_FAMILIES)}")
        if self.exports_adapter:
            raise ValueError("relevance is exported next to a whole base: set lora.export to merged")
        return self

    @property
    def is_of_any_type(self) -> bool:
        """Return whether the model's own files alone define the model."""
        return self.family in ANY_TYPE_FAMILIES

    @property
    def image_kind(self) -> ImageKind:
        """How images become tokens."""
        if self.family in GRID_FAMILIES or (self.is_of_any_type and self.max_pixels is not None):
            return "grids"
        return "published" if self.family in PUBLISHED_FAMILIES else "squares"

    @property
    def image_settings(self) -> dict[str, object] | None:
        """Changed settings of the published image processor; None changes none.

        Images of one tile skip the published SmolVLMs' first resizing: it prepares cutting, and would only enlarge
        small images and reduce them again.
        """
        if self.is_of_any_type:
            return self.image_processor
        cuts = self.longest_edge is not None
        tile = {"do_image_splitting": cuts, "do_resize": cuts, "max_image_size": {"longest_edge": self.image_size}}
        return tile | ({"size": {"longest_edge": self.longest_edge}} if cuts else {})

    @property
    def image_token(self) -> str:
        """Image token of the family's published tokenizers."""
        return IMAGE_PAD if self.image_kind == "grids" else IMAGE_TOKEN

    @property
    def tokenizer_source(self) -> WeightsConfig:
        """Where a published tokenizer comes from: at its own revision, or at that of weights from the same address."""
        of_weights = (part.revision for part in self.sources.values() if part and part.weights == self.tokenizer)
        return WeightsConfig(
            weights=self.tokenizer, revision=self.tokenizer_revision or next(of_weights, ""), config={}
        )

    @property
    def sources(self) -> dict[str, WeightsConfig | None]:
        """Where each part comes from by its field: `pretrained`, or the parts, of which a projector may be new."""
        names = ("pretrained",) if self.pretrained else PARTS
        return {name: getattr(self, name) for name in names}

    @property
    def drawn_parts(self) -> list[str]:
        """Fields of the parts that answer, projector and language model, whose weights are drawn at random."""
        return [name for name, part in self.sources.items() if name != "tower" and not (part and part.weights)]

    def origins(self) -> dict[str, str]:
        """The source of each part, in words."""
        return {
            name: part.origin(self.seed) if part else f"drawn from seed {self.seed}"
            for name, part in self.sources.items()
        }

    @property
    def caches_if_auto(self) -> bool:
        """Return whether features.cache auto may store the tower's output. Whether that of family hf can be stored,
        only an examination of its model type says: there the run file must ask for it."""
        return "tower" in self.freeze and not (self.is_of_any_type and self.image_kind == "published")

    @property
    def has_patterns(self) -> bool:
        """Return whether parameters are chosen by their names, beyond whole parts."""
        return bool(self.freeze_parameters or self.train_parameters or (self.lora and self.lora.train_tokens))

    @property
    def quantizes_base(self) -> bool:
        """Return whether adapters are trained on a quantized language model."""
        return self.lora is not None and self.lora.quantize_base is not None

    @property
    def frozen(self) -> frozenset[ModelPart]:
        """The frozen parts before patterns of parameters apply: those in `freeze`, and those with adapters.

        `vlmpipe.trainer.models.layers.freeze` decides about each parameter.
        """
        return frozenset((*self.lora.parts, *self.freeze) if self.lora else self.freeze)

    @property
    def exports_adapter(self) -> bool:
        return self.lora is not None and self.lora.export == "adapter"


def _llava_parts(content: dict[str, object], pretrained: object) -> dict[str, object]:
    """A llava model's section, with each part of a whole model from there."""
    if pretrained is not None and (parts := [name for name in PARTS if content.get(name) is not None]):
        raise ValueError(
            f"pretrained is where all parts come from, so {' and '.join(parts)} cannot be given with it: to mix "
            "sources, give tower, projector and language_model, whose weights may be those of a whole LLaVA"
        )
    for name, part, instead in (
        ("pretrained", pretrained, "give tower and language_model, each with a config"),
        ("projector", content.get("projector"), "leave projector out, and a new one is drawn"),
    ):
        if part.get("config") if isinstance(part, dict) else getattr(part, "config", None):
            raise ValueError(f"{name} of family llava takes weights only: {instead}")
    return {**content, **dict.fromkeys(PARTS, pretrained)} if pretrained else content


def _require_published(model: ModelConfig) -> None:
    """Raise ValueError for a model of family hf whose processor and weights do not come from one place."""
    sizes = {"image_size", "longest_edge", "feature_layer", "feature_select"}
    if model.max_pixels is None:
        sizes |= {"min_pixels"}
    elif model.image_processor is not None:
        raise ValueError("image_processor does not apply with max_pixels, by which images are resized: leave one out")
    _require_bounds(model)
    if unfit := sorted(sizes & changed_fields(model)):
        raise ValueError(
            f"{unfit[0]} does not apply to family hf: the model says which features it takes, its processor how large "
            "images are; image_processor changes the processor's settings"
        )
    if not model.tower.weights:
        raise ValueError("pretrained of family hf takes weights only: the image processor comes with them")
    if model.tokenizer.startswith("train:"):
        raise ValueError("family hf takes a published tokenizer, such as that of model.pretrained: it has image tokens")


def _require_bounds(model: ModelConfig) -> None:
    if model.max_pixels is not None and (model.min_pixels or 0) > model.max_pixels:
        raise ValueError(f"min_pixels {model.min_pixels} is more than max_pixels {model.max_pixels}")


def changed_fields(section: Section) -> set[str]:
    """Names of the fields that are not at their defaults."""
    fields = type(section).model_fields
    return {name for name, field in fields.items() if getattr(section, name) != field.default}
