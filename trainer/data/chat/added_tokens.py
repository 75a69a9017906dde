"""Tokens that a run's tokenizer adds to those of the pretrained model, whose rows must be trained to mean anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmpipe.trainer.config.model import IMAGE_TOKEN, ModelConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.data.tokenize import PAD, TRAINED_PREFIX, control_tokens, pretrained_tokenizer
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.layers.freeze import token_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHOWN = 4  # tokens named in an error


def added_tokens(config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Tokens without a row of their own in the pretrained language model, sorted: those beyond its embedding, and where
    another tokenizer is taken those that the model's own does not have at the same place.

    Without those of padding and of images, which preparation adds and no answer has; and none of a tokenizer that is
    trained on the data, all of whose tokens are new.
    """
    base = config.language_model
    if not base.weights or config.tokenizer.startswith(TRAINED_PREFIX):
        return []
    rows = _rows_of(base)
    vocabulary = tokenizer.get_vocab()
    added = {token for token, number in vocabulary.items() if number >= rows}
    if config.tokenizer != base.weights and (known := _own_vocabulary(base)):
        added |= {token for token, number in vocabulary.items() if known.get(token) != number}
    form = image_form_of(config)
    return sorted(added - {PAD, IMAGE_TOKEN, form.placeholder_in(tokenizer), *control_tokens(form)})


def trained_tokens(config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids of `model.lora.train_tokens`, sorted; empty without.

    Raises ConfigError for a token that the tokenizer lacks, for added ones where it adds none, and where PEFT could not
    load an adapter with such rows.
    """
    if not config.lora or not (requested := config.lora.train_tokens):
        return []
    vocabulary, names = tokenizer.get_vocab(), requested
    if requested == "added" and not (names := tuple(added_tokens(config, tokenizer))):
        raise ConfigError(
            f"model.lora.train_tokens is added, and model.tokenizer {config.tokenizer!r} adds no token to those of the "
            "pretrained model",
            expected="a tokenizer with more tokens, or the names of tokens",
            fix="leave model.lora.train_tokens out, or name the tokens: [<token>, ...]",
        )
    if unknown := [name for name in names if name not in vocabulary]:
        raise ConfigError(
            f"model.lora.train_tokens has {unknown[0]!r}, which model.tokenizer {config.tokenizer!r} does not have as "
            "one token",
            expected="tokens as the tokenizer's vocabulary has them",
            fix="correct the name, or add the token to the tokenizer's folder",
        )
    tokens = sorted({vocabulary[name] for name in names})
    if config.exports_adapter and tokens[-1] >= (rows := _rows_of(config.language_model)):
        raise ConfigError(
            f"model.lora.train_tokens has tokens beyond the {rows} rows of the base's embedding, and PEFT loads an "
            "adapter on the base as it is",
            expected="tokens with a row in the base",
            fix="set model.lora.export to merged",
        )
    return tokens


def require_trained_tokens(model: object, config: ModelConfig, tokenizer: object) -> None:
    """Raise ConfigError where the tokenizer adds tokens, and their rows in the embedding or the head of a model are not
    trained.
    """
    if "language_model" not in config.frozen and not config.freeze_parameters:
        return
    named = config.lora.train_tokens if config.lora else ()
    names = [name for name, weight in token_rows(model).items() if not weight.requires_grad or named]
    if not names or named == "added" or not (added := sorted(set(added_tokens(config, tokenizer)) - set(named))):
        return
    why = "model.lora trains adapters of other layers" if config.lora else "they are frozen"
    fix = f"set model.train_parameters: [{', '.join(names)}]"
    if config.lora and not config.lora.quantize_base:
        why = "model.lora.train_tokens does not name them" if named else why
        fix = "set model.lora.train_tokens: added" + (
            ", or name them" if named else f", or {fix.removeprefix('set ')} for all rows"
        )
    more = f" and {len(added) - SHOWN} more" if len(added) > SHOWN else ""
    raise ConfigError(
        f"model.tokenizer {config.tokenizer!r} has {len(added)} tokens that the pretrained model has not learned "
        f"({', '.join(map(repr, added[:SHOWN]))}{more}), and their rows in {' and '.join(names)} cannot learn: {why}",
        expected="rows that are trained, or the tokenizer of the pretrained model",
        fix=fix,
    )


def _rows_of(base: WeightsConfig) -> int:
    from vlmpipe.trainer.models.hf_native.pretrained import part_config  # imports torch

    return int(part_config(base).get_text_config().vocab_size)


def _own_vocabulary(base: WeightsConfig) -> dict[str, int]:
    """The vocabulary that is stored with the model; empty where none is."""
    try:
        vocabulary: dict[str, int] = pretrained_tokenizer(base.weights, base.revision).get_vocab()
    except UserError as error:
        if error.code not in (ExitCode.UNAVAILABLE, ExitCode.CONFIG):
            raise
        return {}
    return vocabulary
