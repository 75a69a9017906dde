"""Tokenizers made in place, and chat templates written for tests: each does one thing that published ones do."""

from __future__ import annotations

import copy
import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

IMAGE, END = "<|image_pad|>", "<|end|>"
# Contents as strings or as parts, of all roles, with an end token and a line end behind it.
PLAIN = (
    "{% for message in messages %}<|turn|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
THINKS = PLAIN.replace(
    "{% if message.content is", "{{ '<think>' + message.reasoning_content + '</think>' if message.reasoning_content }}"
    "{% if message.content is",
)  # fmt: skip
CALLS = (
    "{% for call in message.tool_calls %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>"
    "{% endfor %}"
)
TOOLS = "{% if tools %}<|turn|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
WITH_TOOLS = TOOLS + PLAIN.replace("{% endif %}<|end|>", "{% endif %}" + CALLS + "<|end|>")
TEMPLATES = {
    "plain": PLAIN,
    "tools": WITH_TOOLS,
    "tools without calls": TOOLS + PLAIN,
    "calls without tools": WITH_TOOLS.removeprefix(TOOLS),
    "calls by name": WITH_TOOLS.replace("{{ call.function.arguments | tojson }}", ""),
    "calls without an end": WITH_TOOLS.replace("<|end|>\n{% endfor %}{% if add", "{{ '' if message.tool_calls else "
        "'<|end|>' }}\n{% endfor %}{% if add"),
    "calls in Python": WITH_TOOLS.replace("arguments | tojson", "arguments"),
    "prompt thinks, with tools": WITH_TOOLS.replace("assistant\n{% endif %}", "assistant\n<think></think>{% endif %}"),
    "thinks": THINKS,
    "drops earlier thinking": THINKS.replace("reasoning_content }}", "reasoning_content and loop.last }}"),
    "moves tagged thinking": PLAIN.replace("{{ part.text }}", "{{ part.text.split('</think>')[-1] }}"),
    "strips": PLAIN.replace("{{ part.text }}", "{{ part.text | trim }}"),
    "strips line ends": PLAIN.replace("{{ part.text }}", "{{ part.text.strip('\\n') }}"),
    "upper case": PLAIN.replace("{{ part.text }}", "{{ part.text | upper }}"),
    "no end token": PLAIN.replace("<|end|>", ""),
    "blank before answers": PLAIN.replace("{{ message.role }}\n", "{{ message.role }}: ").replace(
        "assistant\n", "assistant:"
    ),
    "no images in answers": PLAIN.replace(
        "part.type == 'image' %}", "part.type == 'image' %}{% if message.role != 'assistant' %}"
    ).replace("<|vision_end|>", "<|vision_end|>{% endif %}"),
    "images first": PLAIN.replace(
        "{% for part in message.content %}",
        "{% for part in message.content | rejectattr('type', 'equalto', 'text') %}<|image_pad|>\n{% endfor %}"
        "{% for part in message.content | selectattr('type', 'equalto', 'text') %}",
    ),
    "alternates": "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + PLAIN,
    "dates": "{% if messages[0].role != 'system' %}<|turn|>system\nIt is {{ strftime_now('%d %B') }}.<|end|>\n"
    "{% endif %}" + PLAIN,
    "prompt thinks": PLAIN.replace("assistant\n{% endif %}", "assistant\n<think></think>{% endif %}"),
    "repeats": PLAIN.replace("{{ part.text }}", "{{ part.text }} {{ part.text }}"),
    "reorders": PLAIN.replace("in message.content %}", "in message.content | reverse %}"),
    "parts as code": PLAIN.replace("message.role }}\n", "message.role }}\n{% if message.role == 'system' %}")
    .replace("{% if message.content is string", "{{ message.content }}{% elif message.content is string")
    .replace("{% else %}{% for part", "{% else %}{% for part"),
    "text only": PLAIN.replace("{% if message.content is string %}", "").replace(
        PLAIN[PLAIN.index("{% else %}{% for part") : PLAIN.index("<|end|>")], ""
    ),
    "not Jinja": PLAIN + "{% endfor %}",
}  # fmt: skip


@functools.cache
def tokenizer_with(image: str = IMAGE, end: str = END, bos: str | None = None, *more: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with these tokens, named as published ones name them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [*filter(None, (end, bos, image)), *more, "<|turn|>", "<|vision_start|>", "<|vision_end|>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special) + 60,
        special_tokens=list(dict.fromkeys(special)),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = ["user assistant system what is this? a cat. is it old? no: it is a kitten."] * 9 + ["assistants"] * 50
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end,
        bos_token=bos,
        pad_token="<pad>",
        extra_special_tokens={"image_token": image},
        clean_up_tokenization_spaces=False,
    )


def with_template(template: str, **tokens: Any) -> PreTrainedTokenizerFast:
    """A new tokenizer with this chat template."""
    tokenizer = copy.deepcopy(tokenizer_with(**tokens))
    tokenizer.chat_template = template
    return tokenizer
