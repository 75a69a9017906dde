"""The run file's `model.lora` section: adapters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vlmpipe.trainer.config.base import OfFeature, Positive, Section
from vlmpipe.trainer.config.weights.origin import ModelPart


class LoraConfig(Section):
    """LoRA (Hu et al., 2021): small trained matrices added to a part's frozen weights."""

    rank: Positive = Field(16, description="Inner width of each adapter.")
    alpha: float = Field(32.0, gt=0, description="Scale of adapters: their output is multiplied by alpha / rank.")
    use_rslora: bool = Field(
        False, description="Scale by alpha / sqrt(rank) instead (Kalajdzievski, 2023), for high ranks."
    )
    use_dora: bool = Field(
        False,
        description="Also train the norm of each row of the adapted weights (DoRA; Liu et al., 2024), which each pass "
        "computes again. For ddp, fsdp, hsdp, zero1, zero2 and pp+dp.",
    )
    parts: tuple[ModelPart, ...] = Field(
        ("language_model",), min_length=1, description="Parts of the model that get adapters."
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of an adapter's inputs set to 0; the draws depend on the number of data-parallel ranks.",
    )
    targets: tuple[str, ...] = Field(
        (),
        description="Linear layers and experts with adapters: names inside the layers of tower and language model, "
        "such as q_proj or mlp.experts.down_proj, and of the projector; empty is all of them but gates of a few rows.",
    )
    train_tokens: Literal["added"] | tuple[str, ...] = Field(
        (),
        description="Tokens whose rows of embedding and head are trained as well, other rows staying as they are: by "
        "name, or added for all that the tokenizer adds to those of the model; empty for none. The optimizer has "
        "state for both whole matrices.",
    )
    pretrained: str = Field(
        "",
        description="Adapter to start from, in PEFT's format: a hub id, a local folder, gs://bucket/folder, or "
        "run:RUN_ID for the export of a run with export adapter; empty initializes adapters without effect.",
    )
    export: Literal["merged", "adapter"] = Field(
        "merged",
        description="Form of the export: merged is the whole model, with adapters merged into its weights; adapter is "
        "a PEFT folder for the base that model.pretrained names.",
    )
    quantize_base: Annotated[Literal["nf4"] | None, OfFeature("quantized_base")] = Field(
        None,
        description="Storage of the language model's frozen linear layers and experts: nf4 takes 4 bits a weight "
        "(QLoRA) and makes steps slower, null does not quantize. For ddp, fsdp and hsdp. A merged export has adapters "
        "merged into the quantized weights; an adapter export is for the full base, and is evaluated on it.",
    )
