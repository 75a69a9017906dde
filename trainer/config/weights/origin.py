"""The parts of a model, and where the weights of a part come from."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from vlmpipe.trainer.config.base import Section, StorageUri

ModelPart = Literal["tower", "projector", "language_model"]
PARTS: tuple[ModelPart, ...] = get_args(ModelPart)


class WeightsConfig(Section):
    """Where a part of the model comes from: pretrained `weights`, or a `config` to draw at random. Exactly one."""

    weights: StorageUri = Field(
        "",
        description="Pretrained weights: a Hugging Face hub id, a folder, local or in a bucket (gs://, s3://), or "
        "run:RUN_ID for the export of a run under output.root_uri.",
    )
    revision: str = Field(
        "",
        description="Commit of the hub repository, or of a bucket's folder the digest of its files that a run "
        "records. Pin it for a reproducible run.",
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="transformers configuration (with model_type) for random initial weights."
    )

    def origin(self, seed: int) -> str:
        if not self.weights:
            return f"{self.config['model_type']}, drawn from seed {seed}"
        return f"{self.weights} at {self.revision}" if self.revision else self.weights

    @model_validator(mode="after")
    def _exactly_one(self) -> WeightsConfig:
        if bool(self.weights) == bool(self.config):
            raise ValueError("give exactly one of weights (a hub id or folder) and config (random initial weights)")
        if self.config and "model_type" not in self.config:
            raise ValueError("config needs model_type, for example siglip_vision_model or qwen2")
        return self
