"""The chat template of a run file, so far as it is on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.trainer.config.data import OWN_FORMAT
from vlmpipe.trainer.data.tokenize import TRAINED_PREFIX
from vlmpipe.trainer.storage.base import in_bucket

if TYPE_CHECKING:
    from vlmpipe.trainer.config.data import DataConfig
    from vlmpipe.trainer.config.model import ModelConfig
    from vlmpipe.trainer.data.chat.proof import Proof


def prove_chat_template(model: ModelConfig, data: DataConfig) -> Proof | None:
    """What the template allows; None for the format of models trained from scratch, and for files on other machines.

    Raises ConfigError for a template, and for a local tokenizer, that cannot be used.
    """
    name, weights = data.chat_format(model), (model.pretrained or model.language_model).weights
    tokenizer = "" if model.tokenizer.startswith(TRAINED_PREFIX) else model.tokenizer
    elsewhere = any(one and not Path(one).expanduser().is_dir() for one in (tokenizer, weights))
    if tokenizer and name == OWN_FORMAT and Path(tokenizer).expanduser().is_dir():
        from vlmpipe.trainer.data.tokenize import pretrained_tokenizer

        pretrained_tokenizer(tokenizer)
    if name == OWN_FORMAT or in_bucket(name) or elsewhere:
        return None
    from vlmpipe.trainer.data.chat.make import make_chat  # imports transformers
    from vlmpipe.trainer.data.chat.proof import prove

    return prove(make_chat(model, data, ()))
