"""Tiny published models of many types of transformers: a folder each with configuration, weights, processor, tokenizer
and chat template, as a person would name one in `model.pretrained`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from tests.support.hf.kinds import END, KINDS, TEXT, VISION, VOCABULARY, Kind
from vlmpipe.trainer.models.hf.processor import without_video


def template(placeholder: str) -> str:
    """A chat template in the manner of published ones."""
    return (
        "{% for message in messages %}<|turn|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "{% if part.type == 'image' %}PLACEHOLDER{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    ).replace("PLACEHOLDER", placeholder)


def publish(
    model_type: str,
    folder: Path,
    *,
    seed: int = 0,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
) -> Path:
    """Write a model of this type with random weights, so large that attention tells tokens apart.

    text, vision: settings of its parts that are other than usual.
    """
    kind = KINDS[model_type]
    tokenizer = tokenizer_of(model_type)
    torch.manual_seed(seed)
    config = config_of(kind, model_type, tokenizer, text or {}, vision or {})
    model = AutoModelForImageTextToText.from_config(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim > 1 else 1)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(END)
    model.save_pretrained(folder)
    pictures = image_processor_class(kind.images_of or model_type)(**kind.images)
    named = kind.processor_class and getattr(transformers, kind.processor_class)
    bare = without_video(named or PROCESSOR_MAPPING[CONFIG_MAPPING[model_type]])
    own = {"image_processor": pictures, "tokenizer": tokenizer}
    processor = bare(*[own.get(name) for name in bare.get_attributes()], **kind.processor)
    processor.image_processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(settings_of(processor))
    return folder


def settings_of(processor: Any) -> str:
    content = {name: value for name, value in processor.to_dict().items() if value is not None}
    return json.dumps(content)


def image_processor_class(model_type: str) -> Any:
    classes = IMAGE_PROCESSOR_MAPPING[CONFIG_MAPPING[model_type]]
    return classes["pil"] if "pil" in classes else classes["torchvision"]


def config_of(kind: Kind, model_type: str, tokenizer: Any, own_text: dict[str, Any], own_vision: dict[str, Any]) -> Any:
    token = tokenizer.convert_tokens_to_ids(kind.image_token or kind.placeholder)
    vision = VISION | kind.vision | own_vision
    text = TEXT | kind.text | own_text
    if "mrope_section" in str(text):  # theirs count patches by depth and heads
        vision = {name: value for name, value in vision.items() if not name.startswith("num_") or name in kind.vision}
    ids = {"image_token_id": token}
    if kind.video_token:
        ids["video_token_id"] = tokenizer.convert_tokens_to_ids(kind.video_token)
    return CONFIG_MAPPING[model_type](text_config=text, vision_config=vision, **ids, **kind.config)


@functools.cache
def tokenizer_of(model_type: str) -> PreTrainedTokenizerFast:
    return tokenizer_for(KINDS[model_type])


def tokenizer_for(kind: Kind) -> PreTrainedTokenizerFast:
    """Trained in place, with the type's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<s>", "</s>", "<|turn|>", END, kind.placeholder, *kind.tokens]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(kind.words),
        special_tokens=list(dict.fromkeys(specials)),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user what is this assistant it is seven" * 3], trainer)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in kind.words])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        extra_special_tokens=kind.named,
        chat_template=kind.begins + template(kind.placeholder.join(kind.around)),
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def model_section(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"family": "hf", "pretrained": {"weights": str(folder)}, "tokenizer": str(folder)} | changes
