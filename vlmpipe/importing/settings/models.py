"""Names of models in imported files, as the `model` section of a run file."""

from __future__ import annotations

import re

# Examples where no model is named: for few GPUs, and for MANY_GPUS or more.
SMALL_MODEL, LARGE_MODEL, MANY_GPUS = "Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-8B-Instruct", 16
MAX_PIXELS = 501_760  # 640 tokens of 28 x 28 pixels
# Name of a model -> family. In this order: the first that fits.
_FAMILIES = (
    (re.compile(r"qwen2[._-]5[-_]vl", re.IGNORECASE), "qwen2_5_vl"),
    (re.compile(r"qwen3[-_]vl(?!.*-a\d+b)", re.IGNORECASE), "qwen3_vl"),
    (re.compile(r"smolvlm2", re.IGNORECASE), "smolvlm"),
    (re.compile(r"llava-hf/llava-1\.5-", re.IGNORECASE), "llava"),
    (
        re.compile(
            r"[-_/.]vl(m)?[-_\d]|[-_]vl$|vision|llava|internvl|paligemma|gemma-?3(?!n)-(4|12|27)b|gemma-?4|idefics|"
            r"pixtral|molmo|minicpm-v|smolvlm|florence|blip|kosmos|aya-vision|glm-4[.\d]*v|mllama|ovis|lfm2-vl|multimodal",
            re.IGNORECASE,
        ),
        "hf",
    ),
)
_MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*|(gs|s3)://\S+|[./]\S*")


def family_of(name: str) -> str:
    """The family of a published vision-language model; empty for text models and unknown names."""
    return next((family for pattern, family in _FAMILIES if pattern.search(name)), "")


def model_fields(name: str, *, max_pixels: int | None = None) -> dict[str, object]:
    """Fields of the section `model` for a model whose family is known, by dotted name."""
    family = family_of(name)
    fields: dict[str, object] = {"model.family": family}
    if family == "llava":
        parts = ("tower", "projector", "language_model")
        fields |= {f"model.{part}.weights": name for part in parts}
        fields |= {"model.feature_layer": -2, "model.feature_select": "drop_cls", "model.image_size": 336}
    else:
        fields["model.pretrained.weights"] = name
    fields["model.tokenizer"] = name
    if family in ("qwen2_5_vl", "qwen3_vl"):
        fields["model.max_pixels"] = max_pixels or MAX_PIXELS
    if family == "smolvlm":
        fields["model.image_size"] = 512
    return fields


def is_model_name(text: object) -> bool:
    """Return whether a text has the form of a hub id or of a place of weights."""
    return isinstance(text, str) and bool(_MODEL_NAME.fullmatch(text))
