"""Makes a run's chat: its tokenizer, the chat template that the run file names, and the tokens that end answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from trainer.config.data import DataConfig
from trainer.config.model import ModelConfig, WeightsConfig
from trainer.data.chat.encode import Chat
from trainer.data.chat.proof import require_answers
from trainer.data.tokenize import PAD, control_tokens, make_tokenizer, pretrained_tokenizer, require_tokens
from trainer.errors import ConfigError
from trainer.models.image_tokens import image_form_of
from trainer.models.published import published_file
from trainer.storage import open_storage
from trainer.storage.regular_files import read_regular

NATIVE, OWN = "native", "vlmpipe"
MAX_TEMPLATE_BYTES = 4 << 20
PROCESSOR_TEMPLATE = "chat_template.json"  # of processors saved by older releases, which tokenizers do not read
GENERATION = "generation_config.json"


def format_of(model: ModelConfig, data: DataConfig) -> str:
    """`native`, `vlmpipe` or the address of a template."""
    if data.chat_template:
        return data.chat_template
    return NATIVE if model.pretrained and model.pretrained.weights else OWN


def format_identity(model: ModelConfig, data: DataConfig) -> tuple[str, str]:
    """The format, and its template where that is a file. Part of prepared data's fingerprint."""
    name = format_of(model, data)
    return name, "" if name in (NATIVE, OWN) else read_template(name)


def make_chat(model: ModelConfig, data: DataConfig, texts: Iterable[str]) -> Chat:
    """The chat of a run file. `texts` train a tokenizer where the run file asks for one.

    Raises ConfigError for a template that writes no question about an image and its answer, and what `make_tokenizer`
    raises.
    """
    name, form = format_of(model, data), image_form_of(model)
    if name == OWN:
        return Chat(make_tokenizer(model.tokenizer, texts, form), form)
    if model.tokenizer.startswith("train:"):
        if name == NATIVE:
            raise ConfigError(
                f"data.chat_template is native, and model.tokenizer is {model.tokenizer}, which has no template",
                expected="the tokenizer of a chat model",
                fix="set data.chat_template: vlmpipe",
            )
        tokenizer = make_tokenizer(model.tokenizer, texts, form)
    else:
        tokenizer = pretrained_tokenizer(model.tokenizer)
        if form.is_in_tokenizer or form.grids:
            require_tokens(model.tokenizer, tokenizer, (form.token_in(tokenizer), *control_tokens(form)))
        elif tokenizer.convert_tokens_to_ids(form.token_in(tokenizer)) in (None, tokenizer.unk_token_id):
            tokenizer.add_special_tokens({"extra_special_tokens": [form.token_in(tokenizer)]}, False)
        if tokenizer.pad_token is None:
            tokenizer.add_special_tokens({"pad_token": PAD})
    tokenizer.chat_template = read_template(name) if name != NATIVE else native_template(model.tokenizer, tokenizer)
    part = model.pretrained or model.language_model
    return require_answers(
        lambda as_text: Chat(
            tokenizer,
            form,
            end_tokens=end_tokens(part, tokenizer),
            added_end=data.answer_end,
            as_text=as_text,
        ),
        f"{name} ({model.tokenizer})" if name == NATIVE else name,
    )


def read_template(address: str) -> str:
    """A template file, local or in a bucket. Raises ConfigError where there is none."""
    folder, _, name = address.rpartition("/")
    try:
        source = open_storage(folder or ".").read(name)
        return source.decode()
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template {address!r} cannot be read: {error}",
            expected="native, vlmpipe, or the address of a Jinja template",
        ) from error


def native_template(name: str, tokenizer: Any) -> str:
    """The template that comes with a tokenizer or with the processor beside it. Raises ConfigError for none."""
    own = content_of(name, "", PROCESSOR_TEMPLATE).get("chat_template") or tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    if not own:
        raise ConfigError(
            f"model.tokenizer {name!r} has no chat template",
            expected="the tokenizer of a chat model",
            fix="set data.chat_template to a template file, or to vlmpipe, the format of models trained from scratch",
        )
    return str(own)


def end_tokens(part: WeightsConfig, tokenizer: Any) -> list[str]:
    """The tokens that end an answer: the tokenizer's, and those at which the published model stops."""
    stated = content_of(part.weights, part.revision, GENERATION).get("eos_token_id") if part.weights else None
    numbers = stated if isinstance(stated, list) else [] if stated is None else [stated]
    tokens = [tokenizer.eos_token, *tokenizer.convert_ids_to_tokens(numbers)]
    return list(dict.fromkeys(token for token in tokens if token))


def content_of(name: str, revision: str, file: str) -> dict[str, Any]:
    """A JSON file of a folder or a hub repository; {} where there is none."""
    path = published_file(name, revision, file)
    content = json.loads(read_regular(path, MAX_TEMPLATE_BYTES)) if path else {}
    return content if isinstance(content, dict) else {}
