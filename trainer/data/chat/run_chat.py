"""Makes a run's chat: its tokenizer, the chat template that the run file names, and the tokens that end answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from vlmpipe.trainer.config.data import NATIVE, OWN_FORMAT, DataConfig
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.chat.proof import require_answers
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.tokenize import (
    PAD,
    TRAINED_PREFIX,
    control_tokens,
    make_tokenizer,
    own_template,
    pretrained_tokenizer,
    require_tokens,
)
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.hooks.features import features_of
from vlmpipe.trainer.models.image_tokens import ImageForm, image_form_of
from vlmpipe.trainer.models.published import published_json, stop_token_ids
from vlmpipe.trainer.storage import open_storage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_TEMPLATE_BYTES = 4 << 20
PROCESSOR_TEMPLATE = "chat_template.json"  # of processors saved by older releases, which tokenizers do not read


@runtime_checkable
class ChatCheck(Protocol):
    """A feature that needs something of a chat: a hook beside those of its base, for preparation."""

    def require_chat(self, chat: Chat, model: ModelConfig) -> None:
        """Raise ConfigError for what model, tokenizer or template lacks."""
        ...


def format_identity(model: ModelConfig, data: DataConfig) -> tuple[str, str]:
    """The format, and its template where that is a file. Part of prepared data's fingerprint."""
    name = data.chat_format(model)
    return name, "" if name in (NATIVE, OWN_FORMAT) else read_template(name)


def make_chat(model: ModelConfig, data: DataConfig, texts: Iterable[str]) -> Chat:
    """The chat of a run file. `texts` train a tokenizer where the run file asks for one.

    Raises ConfigError for a template that writes no question about an image and its answer, and what `make_tokenizer`
    raises.
    """
    name, form = data.chat_format(model), image_form_of(model)
    if name == OWN_FORMAT:
        chat = Chat(make_tokenizer(model.tokenizer, texts, form, model.tokenizer_source.revision), form)
        _require_chat(chat, model, data)
        return chat
    if not model.tokenizer.startswith(TRAINED_PREFIX):
        tokenizer = _published(model.tokenizer_source, form)
    elif name == NATIVE:
        raise ConfigError(
            f"data.chat_template is native, and model.tokenizer is {model.tokenizer}, which has no template",
            expected="the tokenizer of a chat model",
            fix="set data.chat_template: vlmpipe",
        )
    else:
        tokenizer = make_tokenizer(model.tokenizer, texts, form)
    tokenizer.chat_template = (
        native_template(model.tokenizer_source, tokenizer) if name == NATIVE else read_template(name)
    )
    if data.answer_end and tokenizer.backend_tokenizer.token_to_id(data.answer_end) is None:
        raise ConfigError(
            f"data.answer_end {data.answer_end!r} is no token of model.tokenizer {model.tokenizer!r}",
            expected=f"one of its tokens, such as {tokenizer.eos_token}",
        )
    stops = tokenizer.convert_ids_to_tokens(stop_token_ids(model.pretrained or model.language_model))
    ends = [token for token in dict.fromkeys((tokenizer.eos_token, *stops)) if token]
    chat = require_answers(
        lambda as_text: Chat(tokenizer, form, end_tokens=ends, added_end=data.answer_end, as_text=as_text),
        f"{name} ({model.tokenizer})" if name == NATIVE else name,
        forms=_forms(model, tokenizer, form),
    )
    first = form.published.first_tokens if form.published else []
    if chat.encode([Turn("question", "answer")], [], []).input_ids[: len(first)] != first:
        raise ConfigError(
            f"the model's processor begins each text with {''.join(tokenizer.convert_ids_to_tokens(first))!r}, and its "
            "chat template does not",
            fix="write the template to a file with that at its beginning, and name the file in data.chat_template",
        )
    _require_chat(chat, model, data)
    return chat


def _require_chat(chat: Chat, model: ModelConfig, data: DataConfig) -> None:
    for feature in features_of(data, "data"):
        if isinstance(feature, ChatCheck):
            feature.require_chat(chat, model)


def _forms(model: ModelConfig, tokenizer: PreTrainedTokenizerFast, form: ImageForm) -> tuple[bool, ...]:
    """How images may be given to the template (`Chat.as_text`)."""
    if tokenizer.chat_template == own_template(tokenizer, form):
        return (True,)  # an export of ours, which keeps its template
    # The language model of a llava may be one of texts; a whole model's template writes images.
    return (False,) if model.pretrained else (False, True)


def _published(source: WeightsConfig, form: ImageForm) -> PreTrainedTokenizerFast:
    """A published tokenizer as it is, but for the token of padding and, for llava, that of images."""
    tokenizer = pretrained_tokenizer(source.weights, source.revision)
    image_token = form.placeholder_in(tokenizer)
    if form.is_in_tokenizer or form.grids:
        require_tokens(source.weights, tokenizer, (image_token, *control_tokens(form)))
    missing = {} if tokenizer.pad_token else {"pad_token": PAD}
    tokenizer.add_special_tokens({**missing, "extra_special_tokens": [image_token]}, replace_extra_special_tokens=False)
    return tokenizer


def read_template(address: str) -> str:
    """A template file, local or in a bucket. Raises ConfigError where there is none."""
    folder, _, name = address.rpartition("/")
    storage = open_storage(folder or ".")
    info = storage.stat(name) if name not in ("", ".", "..") else None
    if info is None or info.size_bytes > MAX_TEMPLATE_BYTES:
        raise ConfigError(
            f"data.chat_template {address!r} is no file, or has more than {MAX_TEMPLATE_BYTES:,} bytes",
            expected="native, vlmpipe, or the address of a Jinja template",
        )
    return storage.read(name).decode("utf-8", "replace")


def native_template(source: WeightsConfig, tokenizer: PreTrainedTokenizerFast) -> str:
    """The template that comes with a tokenizer or with the processor beside it. Raises ConfigError for none."""
    template = published_json(source, PROCESSOR_TEMPLATE).get("chat_template") or tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise ConfigError(
            f"model.tokenizer {source.weights!r} has no chat template",
            expected="the tokenizer of a chat model",
            fix="set data.chat_template to a template file, or to vlmpipe, the format of models trained from scratch",
        )
    return str(template)
