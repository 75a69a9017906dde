"""Tokenizers: trained on a run's texts, or pretrained; and the chat template of models trained from scratch.

Its format resembles LLaVA's:

    <s>USER: <image>
    what digit is this? ASSISTANT: 7</s>USER: is it even? ASSISTANT: no</s>
"""

from __future__ import annotations

import json
import re
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import le
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.models.image_tokens import SQUARES, ImageForm
from vlmpipe.trainer.models.published import settings_folder
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.model_folders import local_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FOLDER = "tokenizer"  # in prepared data
GENERAL_CLASS = "TokenizersBackend"  # of transformers: everything is in tokenizer.json
TRAINED_PREFIX = "train:"
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SPECIALS = (PAD, BOS, EOS, IMAGE_TOKEN)
BYTES_ALPHABET = 256
LARGEST_TOKENIZER_BYTES = 256 << 20  # of one file
MAX_TRAINING_CHARS = 1 << 20  # of a text
FEW = 4  # tokens named in an error
CONTROL_TOKEN = re.compile("<[^<>]+>")
# Any of these sets of files is a tokenizer. Without one transformers makes an empty tokenizer, and says nothing.
VOCABULARIES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("vocab.txt",))
PROBE = "Sphinx of black quartz, judge my vow: 0123456789? THE QUICK BROWN FOX (jumps) over 'the' lazy dog!"
QUESTION_PREFIX, ANSWER_PREFIX = "USER: ", " ASSISTANT:"

# In a content list, an image is its mark and, where something follows, a line end, as in training. A system text begins
# the question after it.
CHAT_TEMPLATE = (
    "{{- bos_token or '' -}}"
    "{%- for message in messages -%}"
    "{%- set continued = loop.previtem is defined and loop.previtem['role'] == 'system' -%}"
    "{{- ' ASSISTANT: ' if message['role'] == 'assistant' else '\\n' if continued else 'USER: ' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{{- part['text'] if part['type'] != 'image' else '<image>' if loop.last else '<image>\\n' -}}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- eos_token if message['role'] == 'assistant' else '' -}}"
    "{%- endfor -%}"
    "{{- ' ASSISTANT:' if add_generation_prompt else '' -}}"
)


def make_tokenizer(
    name: str, texts: Iterable[str], form: ImageForm = SQUARES, revision: str = ""
) -> PreTrainedTokenizerFast:
    """The tokenizer that `model.tokenizer` names, with the tokens and the chat template of the format above.

    Raises ConfigError for a bad N and for missing tokens, UserError (exit 69) when a hub id or folder cannot be loaded.

    Args:
        texts: training texts, consumed only for `train:N`.
    """
    if name.startswith(TRAINED_PREFIX):
        tokenizer = _train(trained_size(name, form), texts, control_tokens(form))
    else:
        tokenizer = _completed(name, form, revision)
    tokenizer.chat_template = own_template(tokenizer, form)
    return tokenizer


def own_template(tokenizer: PreTrainedTokenizerFast, form: ImageForm) -> str:
    """The format above with the tokenizer's image token."""
    # SmolVLM's processor puts the tokens around an image in place of its token.
    mark = form.mark if form.grids else IMAGE_TOKEN
    return CHAT_TEMPLATE.replace(IMAGE_TOKEN, mark.replace(IMAGE_TOKEN, form.placeholder_in(tokenizer)))


def trained_size(name: str, form: ImageForm = SQUARES) -> int:
    """N of `train:N`. Raises ConfigError for one that leaves no room for bytes and control tokens."""
    num_specials = len(SPECIALS) + len(control_tokens(form))
    smallest, size = BYTES_ALPHABET + num_specials, name.removeprefix(TRAINED_PREFIX)
    if not size.isdecimal() or int(size) < smallest:
        raise ConfigError(
            f"model.tokenizer {name!r} is not a size that a tokenizer can be trained to",
            expected=f"train:N with N at least {smallest} ({BYTES_ALPHABET} bytes and {num_specials} control tokens)",
        )
    return int(size)


def control_tokens(form: ImageForm) -> list[str]:
    """Control tokens of images beside the image token itself."""
    tokens = dict.fromkeys((*CONTROL_TOKEN.findall(form.mark), *form.control_tokens))
    return [token for token in tokens if token != IMAGE_TOKEN]


def training_texts(turns: Iterable[Turn]) -> Iterable[str]:
    """Training texts of a tokenizer: the beginnings of questions and answers, split as pre-tokenization would split
    them. Training takes 125 to 154 bytes a character of a text (tokenizers 0.23, one text of 1 to 16 million
    characters in words of 16 letters in the mean), and a compressed column may hold gigabytes.
    """
    for turn in turns:
        system, question, answer = (text[:MAX_TRAINING_CHARS] for text in (turn.system, turn.question, turn.answer))
        system = f"{system}\n" if system else ""
        yield f"{QUESTION_PREFIX}{system}{question.replace(IMAGE_TOKEN, '')}{ANSWER_PREFIX}"
        yield f" {answer}"


def load_tokenizer(storage: Storage) -> PreTrainedTokenizerFast:
    """The tokenizer saved with prepared data. One of transformers' general class needs no torch."""
    with tempfile.TemporaryDirectory() as scratch:
        for info in storage.list(FOLDER):
            Path(scratch, Path(info.name).name).write_bytes(storage.read(info.name))
        settings = Path(scratch, "tokenizer_config.json")
        if settings.is_file() and json.loads(settings.read_bytes()).get("tokenizer_class") == GENERAL_CLASS:
            from transformers import PreTrainedTokenizerFast as Loader  # the general class
        else:
            from transformers import AutoTokenizer as Loader  # finds the class, and looks for a model's configuration
        return Loader.from_pretrained(scratch, trust_remote_code=False)


def _train(size: int, texts: Iterable[str], around: list[str]) -> PreTrainedTokenizerFast:
    """A new byte-level BPE tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*SPECIALS, *around],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE_TOKEN},
        clean_up_tokenization_spaces=False,
    )


def pretrained_tokenizer(name: str, revision: str = "") -> PreTrainedTokenizerFast:
    """A published tokenizer, as it is. `revision`: of a hub repository or a bucket's folder; "" for the newest.

    Raises ConfigError for a slow one and for one that does not give English text back, UserError (69) for one out of
    reach.
    """
    from transformers import AutoTokenizer

    folder = local_folder(name, revision, weights=False)
    if folder:
        _require_vocabulary(name, folder)
    try:
        folder = folder or settings_folder(WeightsConfig(weights=name, revision=revision))
        tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.tokenizer {name!r} cannot be loaded: {str(error).splitlines()[0]}",
            expected="a hub id or a folder with tokenizer.json, or train:N",
            fix="correct the name",
            code=ExitCode.UNAVAILABLE,
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(
            f"model.tokenizer {name!r} has no fast tokenizer",
            expected="a tokenizer.json: labels are found by the character positions that only fast tokenizers give",
        )
    _require_round_trip(name, tokenizer)
    return tokenizer


def _require_vocabulary(name: str, folder: Path) -> None:
    """Raise ConfigError for a folder whose tokenizer transformers would make up."""
    if any(all((folder / file).is_file() for file in files) for files in VOCABULARIES):
        return
    raise ConfigError(
        f"model.tokenizer {name!r} has no {VOCABULARIES[0][0]}",
        expected="a folder with " + ", or ".join(" and ".join(files) for files in VOCABULARIES),
        fix="copy all files of the tokenizer into the folder, or name the folder that has them",
    )


def _require_round_trip(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise ConfigError unless the tokens of English text decode to the text, apart from white space."""
    tokens = tokenizer.backend_tokenizer.encode(PROBE, add_special_tokens=False).ids
    decoded = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    if decoded.split() and "".join(decoded.split()) == "".join(PROBE.split()):
        return
    raise ConfigError(
        f"model.tokenizer {name!r} writes {PROBE!r} in {len(tokens)} tokens, which decode to {decoded!r}",
        expected="tokens that decode to the text",
        fix="copy all files of the tokenizer again, or choose a tokenizer that has these characters",
    )


def lost_characters(
    text: str,
    ids: Sequence[int],
    starts: Sequence[int],
    stops: Sequence[int],
    tokenizer: PreTrainedTokenizerFast,
    unknown_id: int | None,
) -> str:
    """Characters of a text, without white space, that its tokens do not decode to, in ascending order.

    Where the tokens cover every character and none is the unknown token, nothing is decoded. A character that Unicode
    normalization joins with another is not lost.

    Args:
        starts, stops: where each token begins and ends in the text.
        unknown_id: the unknown token, if the tokenizer has one.
    """
    if (unknown_id is None or unknown_id not in ids) and covers(text, starts, stops):
        return ""
    decoded = tokenizer.decode([token for token in ids if token != unknown_id], clean_up_tokenization_spaces=False)
    missing = Counter(unicodedata.normalize("NFKD", text)) - Counter(unicodedata.normalize("NFKD", decoded))
    return "".join(sorted(character for character in missing.elements() if not character.isspace()))


def covers(text: str, starts: Sequence[int], stops: Sequence[int]) -> bool:
    """Return whether tokens, in the order of their starts, leave nothing out but white space."""
    # Nearly always each token begins where the one before ends, which is seen without a loop in Python.
    if starts and not starts[0] and all(map(le, starts[1:], stops)) and not text[stops[-1] :].strip():
        return True
    ends = list(accumulate(stops, max, initial=0))
    gaps = all(start <= end or text[end:start].isspace() for start, end in zip(starts, ends, strict=False))
    return gaps and not text[ends[-1] :].strip()


def require_tokens(name: str, tokenizer: PreTrainedTokenizerFast, tokens: Iterable[str]) -> None:
    """Raise ConfigError where the tokenizer lacks one of them."""
    if lacking := [token for token in tokens if tokenizer.backend_tokenizer.token_to_id(token) is None]:
        more = f" and {len(lacking) - FEW} more" if len(lacking) > FEW else ""
        raise ConfigError(
            f"model.tokenizer {name!r} lacks {', '.join(lacking[:FEW])}{more}, which the model sees an image by",
            expected="a tokenizer with these tokens, such as that of model.pretrained",
        )


def _completed(name: str, form: ImageForm, revision: str) -> object:
    """A published tokenizer with the tokens of images, of padding and of the end of an answer."""
    tokenizer = pretrained_tokenizer(name, revision)
    needed = (form.placeholder_in(tokenizer), *control_tokens(form))
    if form.is_in_tokenizer:
        require_tokens(name, tokenizer, needed)
    missing = {"pad_token": PAD, "eos_token": EOS}
    tokenizer.add_special_tokens({kind: token for kind, token in missing.items() if getattr(tokenizer, kind) is None})
    tokenizer.add_special_tokens({"extra_special_tokens": list(needed)}, replace_extra_special_tokens=False)
    return tokenizer
