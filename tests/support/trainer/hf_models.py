"""Tiny published models of many types of transformers: a folder each with configuration, weights, processor, tokenizer
and chat template, as a person would name one in `model.pretrained`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from trainer.models.hf.processor import without_video

WIDTH, LAYERS, VOCABULARY = 32, 2, 320
END = "<|end|>"
TEXT: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024, "vocab_size": VOCABULARY,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 16,
}  # fmt: skip
SQUARE = {"height": 16, "width": 16}


@dataclass(frozen=True)
class Kind:
    """What is special about a model type. Entries of `config` and `images` are those of the published files."""

    placeholder: str  # what the chat template writes for an image
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    images: dict[str, Any] = field(default_factory=dict)  # settings of the image processor
    processor: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()  # special ones beside the placeholder
    named: dict[str, str] = field(default_factory=dict)  # special tokens by the names that processors ask for
    image_token: str = ""  # what features replace; empty: the placeholder


KINDS: dict[str, Kind] = {
    "internvl": Kind(
        "<IMG_CONTEXT>",
        text={"model_type": "qwen2"},
        vision={"patch_size": [4, 4], "image_size": [16, 16]},
        config={"downsample_ratio": 0.5},
        images={"size": SQUARE, "min_patches": 1, "max_patches": 2},
        processor={"image_seq_length": 4},
        tokens=("<img>", "</img>", "<video>"),
        named={
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "gemma3": Kind(
        "<start_of_image>",
        text={"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        vision={"model_type": "siglip_vision_model"},
        config={"mm_tokens_per_image": 4},
        images={"size": SQUARE},
        processor={"image_seq_length": 4},
        tokens=("<image_soft_token>", "<end_of_image>"),
        named={
            "image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"
        },
        image_token="<image_soft_token>",
    ),
}  # fmt: skip


def template(placeholder: str) -> str:
    """A chat template in the manner of published ones."""
    return (
        "{% for message in messages %}<|turn|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "{% if part.type == 'image' %}PLACEHOLDER{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    ).replace("PLACEHOLDER", placeholder)


def publish(model_type: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a model of this type with random weights, so large that attention tells tokens apart."""
    kind = KINDS[model_type]
    tokenizer = tokenizer_of(model_type)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config_of(model_type, tokenizer)).float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim > 1 else 1)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(END)
    model.save_pretrained(folder)
    pictures = image_processor_class(model_type)(**kind.images)
    processor_kind = PROCESSOR_MAPPING[CONFIG_MAPPING[model_type]]
    bare = without_video(processor_kind)
    own = {"image_processor": pictures, "tokenizer": tokenizer}
    processor = bare(*[own.get(name) for name in bare.get_attributes()], **kind.processor)
    processor.image_processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(settings_of(processor))
    return folder


def settings_of(processor: Any) -> str:
    import json

    content = {name: value for name, value in processor.to_dict().items() if value is not None}
    return json.dumps(content)


def image_processor_class(model_type: str) -> Any:
    classes = IMAGE_PROCESSOR_MAPPING[CONFIG_MAPPING[model_type]]
    return classes["pil"]


def config_of(model_type: str, tokenizer: Any) -> Any:
    kind = KINDS[model_type]
    token = tokenizer.convert_tokens_to_ids(kind.image_token or kind.placeholder)
    config = CONFIG_MAPPING[model_type](
        text_config=TEXT | kind.text, vision_config=VISION | kind.vision, image_token_id=token, **kind.config
    )
    return config


@functools.cache
def tokenizer_of(model_type: str) -> PreTrainedTokenizerFast:
    """Trained in place, with the type's special tokens."""
    kind = KINDS[model_type]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<s>", "</s>", "<|turn|>", END, kind.placeholder, *kind.tokens]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(dict.fromkeys(specials)),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user what is this assistant it is seven" * 3], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        extra_special_tokens=kind.named, chat_template=template(kind.placeholder), clean_up_tokenization_spaces=False,
    )  # fmt: skip


def model_section(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"family": "hf", "pretrained": {"weights": str(folder)}, "tokenizer": str(folder)} | changes


Publish = Callable[[str], Path]
