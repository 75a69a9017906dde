"""Tokens that a run's tokenizer adds to those of the pretrained model, whose rows must be trained to mean anything."""

from __future__ import annotations

from typing import Any

from vlmpipe.trainer.config.model import IMAGE_TOKEN, ModelConfig, WeightsConfig
from vlmpipe.trainer.data.tokenize import PAD, TRAINED_PREFIX, control_tokens, pretrained_tokenizer
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.layers.freeze import token_rows

SHOWN = 4  # tokens named in an error


def added_tokens(config: ModelConfig, tokenizer: Any) -> list[str]:
    """Tokens without a row of their own in the pretrained language model, sorted: those beyond its embedding, and where
    another tokenizer is taken those that the model's own does not have at the same place.

    Without those of padding and of images, which preparation adds and no answer has; and none of a tokenizer that is
    trained on the data, all of whose tokens are new.
    """
    base = config.language_model
    if not base.weights or config.tokenizer.startswith(TRAINED_PREFIX):
        return []
    from vlmpipe.trainer.models.hf_native.pretrained import part_config  # imports torch

    rows = part_config(base).get_text_config().vocab_size
    vocabulary = tokenizer.get_vocab()
    added = {token for token, number in vocabulary.items() if number >= rows}
    if config.tokenizer != base.weights and (known := _own_vocabulary(base)):
        added |= {token for token, number in vocabulary.items() if known.get(token) != number}
    form = image_form_of(config)
    return sorted(added - {PAD, IMAGE_TOKEN, form.placeholder_in(tokenizer), *control_tokens(form)})


def require_trained_tokens(model: Any, config: ModelConfig, tokenizer: Any) -> None:
    """Raise ConfigError where the embedding or the head of a model is frozen, and the tokenizer adds tokens, which have
    rows in them.
    """
    if "language_model" not in config.frozen and not config.freeze_parameters:
        return
    names = [name for name, weight in token_rows(model).items() if not weight.requires_grad]
    if not names or not (added := added_tokens(config, tokenizer)):
        return
    why = "model.lora trains adapters of other layers" if config.lora else "they are frozen"
    more = f" and {len(added) - SHOWN} more" if len(added) > SHOWN else ""
    raise ConfigError(
        f"model.tokenizer {config.tokenizer!r} has {len(added)} tokens that the pretrained model has not learned "
        f"({', '.join(map(repr, added[:SHOWN]))}{more}), and their rows in {' and '.join(names)} cannot learn: {why}",
        expected="rows that are trained, or the tokenizer of the pretrained model",
        fix=f"set model.train_parameters: [{', '.join(names)}]",
    )


def _own_vocabulary(base: WeightsConfig) -> dict[str, int]:
    """The vocabulary that is stored with the model; empty where none is."""
    try:
        vocabulary: dict[str, int] = pretrained_tokenizer(base.weights, base.revision).get_vocab()
    except UserError as error:
        if error.code not in (ExitCode.UNAVAILABLE, ExitCode.CONFIG):
            raise
        return {}
    return vocabulary
