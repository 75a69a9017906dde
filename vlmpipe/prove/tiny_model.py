"""Tiny models with random weights and all the files that published ones have, made without a download."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from vlmpipe.prove.sample_set import COLOURS, SIDE
from vlmpipe.trainer.config.model import IMAGE_PAD, IMAGE_TOKEN, ModelConfig

PAD, TURN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"
SPECIALS = (PAD, TURN, END, VISION_START, VISION_END, IMAGE_PAD, VIDEO, IMAGE_TOKEN)
SYSTEM = "You are a helpful assistant."
PATCH = 14
QWEN_MARK = f"{VISION_START}{IMAGE_PAD}{VISION_END}"
WEIGHT_SCALE = 4  # larger than usual, so that samples differ in their losses

# Qwen2.5-VL's format. The tags around answers tell trainers that ask for a mask what to label.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if loop.first and message.role != 'system' -%}{{- '<|im_start|>system\n"
    + SYSTEM
    + "<|im_end|>\n' -}}{%- endif -%}"
    "{{- '<|im_start|>' + message.role + '\n' -}}"
    "{%- set written = namespace(text='') -%}"
    "{%- if message.content is string -%}{%- set written.text = message.content -%}"
    "{%- else -%}{%- for part in message.content -%}{%- set written.text = written.text + "
    "('IMAGE' if part.type == 'image' else part.text) -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- if message.role == 'assistant' -%}"
    "{%- generation -%}{{- written.text + '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- written.text + '<|im_end|>' -}}{%- endif -%}"
    "{{- '\n' -}}"
    "{%- endfor -%}"
    "{{- '<|im_start|>assistant\n' if add_generation_prompt else '' -}}"
)
TEXT: dict[str, object] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8192, "bos_token_id": None,
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
VISION: dict[str, object] = {"hidden_size": 32, "intermediate_size": 48, "patch_size": PATCH}
PATCHES = VISION | {
    "depth": 2, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64,
    "in_channels": 3,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Peculiarities of a model type."""

    text: Mapping[str, object]
    vision: Mapping[str, object]
    config: Mapping[str, object]
    mark: str  # what the chat template writes for an image
    image_token: str


TYPES = {
    "qwen2_5_vl": Kind(
        MROPE, PATCHES | {"window_size": SIDE, "fullatt_block_indexes": [1]}, {}, QWEN_MARK, IMAGE_PAD
    ),
    "qwen3_vl": Kind(
        MROPE | {"head_dim": 16},
        PATCHES | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        {},
        QWEN_MARK,
        IMAGE_PAD,
    ),
    "llava": Kind(
        {"model_type": "qwen2"},
        VISION
        | {
            "model_type": "siglip_vision_model", "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE,
            "vision_use_head": False,
        },
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        IMAGE_TOKEN,
        IMAGE_TOKEN,
    ),
}  # fmt: skip


def type_of(config: ModelConfig) -> str:
    """The model type that stands for the run file's family. Families without one of their own train as `hf` does."""
    return config.family if config.family in TYPES else "qwen2_5_vl"


def write_tiny_model(model_type: str, folder: Path) -> None:
    """Write configuration, weights, tokenizer, chat template and processor."""
    kind, tokenizer = TYPES[model_type], _tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("IMAGE", kind.mark)
    ids = dict(zip(SPECIALS, tokenizer.convert_tokens_to_ids(list(SPECIALS)), strict=True))
    ends = {"eos_token_id": ids[END], "pad_token_id": ids[PAD], "vocab_size": len(tokenizer)}
    marks = {"video_token_id": VIDEO, "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    config = CONFIG_MAPPING[model_type](
        text_config={**TEXT, **ends, **kind.text},
        vision_config=kind.vision,
        image_token_id=ids[kind.image_token],
        tie_word_embeddings=False,
        **({} if model_type == "llava" else {name: ids[token] for name, token in marks.items()}),
        **kind.config,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, trust_remote_code=False).float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(WEIGHT_SCALE if weight.ndim > 1 else 1)
        model.get_output_embeddings().weight.mul_(WEIGHT_SCALE)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ids[END], ids[PAD]
    save_tiny_model(model, tokenizer, folder, side=SIDE)


def save_tiny_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, *, side: int) -> None:
    """Write what AutoProcessor and AutoModelForImageTextToText read. side: of the images, in pixels."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = model.config
    save_processor = _save_llava_processor if config.model_type == "llava" else _save_qwen_processor
    save_processor(config.model_type, folder, side=side, patch=config.vision_config.patch_size)


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word of the answers. Pre-tokens are Qwen's, so that no token straddles an answer's start."""
    backend = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"\s*[\r\n]+| ?[^\s<]+|\s+|<"), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (f"system\n{SYSTEM}", "user\nWhat do you see?", "And below?", "assistant\n", *COLOURS)
    backend.train_from_iterator([*texts, " ".join(COLOURS)] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(SPECIALS),
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )


def _save_llava_processor(model_type: str, folder: Path, *, side: int, patch: int) -> None:
    images = SiglipImageProcessorPil(size={"height": side, "width": side})
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    options = {"patch_size": patch, "vision_feature_select_strategy": "full"}
    processor = LlavaProcessor(images, tokenizer, chat_template=tokenizer.chat_template, **options)
    processor.save_pretrained(folder)


def _save_qwen_processor(model_type: str, folder: Path, *, side: int, patch: int) -> None:
    """Files that AutoProcessor reads, with the video half that needs torchvision only where a trainer has it."""
    sizes = {"shortest_edge": side**2, "longest_edge": side**2}
    images = Qwen2VLImageProcessorPil(size=sizes, patch_size=patch, temporal_patch_size=2, merge_size=2)
    images.save_pretrained(folder)
    kind = {"processor_class": {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}[model_type]}
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | kind | {"image_processor_type": "Qwen2VLImageProcessor"}
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")
    videos = {name: value for name, value in settings.items() if name != "image_processor_type"}
    video_kind = "Qwen2VLVideoProcessor" if model_type == "qwen2_5_vl" else "Qwen3VLVideoProcessor"
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps(videos | {"video_processor_type": video_kind}), encoding="utf-8"
    )
    (folder / "processor_config.json").write_text(json.dumps(kind), encoding="utf-8")
