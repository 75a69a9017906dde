"""The chat template of a run file, so far as it is on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmpipe.trainer.config.data import OWN_FORMAT
from vlmpipe.trainer.data.tokenize import TRAINED_PREFIX
from vlmpipe.trainer.storage.base import in_bucket
from vlmpipe.trainer.storage.user_folders import expanded

if TYPE_CHECKING:
    from vlmpipe.trainer.config.data import DataConfig
    from vlmpipe.trainer.config.model import ModelConfig
    from vlmpipe.trainer.data.chat.proof import Proof


def prove_chat_template(model: ModelConfig, data: DataConfig) -> Proof | None:
    """Abilities of the template; None for the format of models trained from scratch, and for files on other machines.

    Raises ConfigError for a template, and for a local tokenizer, that cannot be used.
    """
    name, tokenizer = data.chat_format(model), "" if model.tokenizer.startswith(TRAINED_PREFIX) else model.tokenizer
    if tokenizer and name == OWN_FORMAT and expanded(tokenizer).is_dir():
        from vlmpipe.trainer.data.tokenize import pretrained_tokenizer

        pretrained_tokenizer(tokenizer, model.tokenizer_source.revision)
    if name == OWN_FORMAT or in_bucket(name) or not is_here(model, tokenizer):
        return None
    from vlmpipe.trainer.data.chat.proof import prove
    from vlmpipe.trainer.data.chat.run_chat import make_chat  # imports transformers

    return prove(make_chat(model, data, ()))


def is_here(model: ModelConfig, tokenizer: str) -> bool:
    """Return whether the model's files, and the tokenizer's if one is named, are in folders of this machine."""
    weights = (model.pretrained or model.language_model).weights
    return all(not address or expanded(address).is_dir() for address in (tokenizer, weights))
