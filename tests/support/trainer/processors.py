"""transformers' own processors of text and images; what they need for videos only is not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from transformers import LlavaProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm import processing_smolvlm

from vlmpipe.trainer.data.chat.messages import Message, as_chat

PROCESSORS: dict[str, Any] = {
    "qwen2_5_vl": Qwen2_5_VLProcessor,
    "qwen3_vl": Qwen3VLProcessor,
    "smolvlm": processing_smolvlm.SmolVLMProcessor,
    "llava": LlavaProcessor,
}


@dataclass(frozen=True)
class Processor:
    """A processor as `AutoProcessor` would make it of an export."""

    processor: Any

    @classmethod
    def of(
        cls, family: str, images: Any, tokenizer: Any, patched: pytest.MonkeyPatch, *, tile_tokens: int
    ) -> Processor:
        """tile_tokens: of SmolVLM's tiles."""
        kind, options = PROCESSORS[family], {"chat_template": tokenizer.chat_template}
        if family == "llava":
            return cls(kind(images, tokenizer, patch_size=4, vision_feature_select_strategy="full", **options))
        patched.setattr(processing_smolvlm, "num2words", str)
        patched.setattr(kind, "check_argument_for_proper_class", lambda self, name, value: type(value))
        if family == "smolvlm":
            options["image_seq_len"] = tile_tokens
        processor = kind(images, tokenizer, None, **options)
        processor.video_processor = SimpleNamespace(num_frames=1, fps=1)
        return cls(processor)

    def ids(
        self, messages: Sequence[Message], sizes: Sequence[tuple[int, int]], *, add_generation_prompt: bool = False
    ) -> list[int]:
        """Of a conversation about blank images of these sizes."""
        given, left = as_chat(messages), iter(sizes)
        for message in given:
            for part in message["content"]:
                if part["type"] == "image":
                    part["image"] = Image.new("RGB", next(left))
        made = self.processor.apply_chat_template(
            given, tokenize=True, return_dict=True, add_generation_prompt=add_generation_prompt
        )
        return list(made["input_ids"][0])
