"""Turns conversations into tokens: the tokenizer, the format, labels, prompts and the chat template.

The format resembles LLaVA's:

    <s>USER: <image>
    what digit is this? ASSISTANT: 7</s>USER: is it even? ASSISTANT: no</s>

A sample is tokenized as one text, so that the chat template gives the same tokens with any tokenizer; labels are found
by character position.
"""

from __future__ import annotations

import re
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.model import IMAGE_TOKEN
from trainer.data.sample import Turn
from trainer.errors import ConfigError, ExitCode, UserError
from trainer.models.hub_errors import hub_error
from trainer.storage.base import Storage
from trainer.storage.model_folders import local_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FOLDER = "tokenizer"  # in prepared data
IGNORED = -100  # label of a token that does not count in the loss
TRAINED_PREFIX = "train:"
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SPECIALS = (PAD, BOS, EOS, IMAGE_TOKEN)
BYTES_ALPHABET = 256
LARGEST_TOKENIZER_BYTES = 256 << 20  # of one file
FEW = 4  # tokens named in an error
CONTROL_TOKEN = re.compile("<[^<>]+>")
QUESTION_PREFIX, ANSWER_PREFIX = "USER: ", " ASSISTANT:"

# In a content list, an image is its mark and a line end, as in training.
CHAT_TEMPLATE = (
    "{{- bos_token or '' -}}"
    "{%- for message in messages -%}"
    "{{- ' ASSISTANT: ' if message['role'] == 'assistant' else 'USER: ' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{{- '<image>\\n' if part['type'] == 'image' else part['text'] -}}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- eos_token if message['role'] == 'assistant' else '' -}}"
    "{%- endfor -%}"
    "{{- ' ASSISTANT:' if add_generation_prompt else '' -}}"
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of one sample, and as many labels: -100 except on answers and their end tokens."""

    input_ids: list[int]
    labels: list[int]

    @property
    def label_tokens(self) -> int:
        return len(self.labels) - self.labels.count(IGNORED)


def encode_sample(
    turns: Sequence[Turn],
    image_token_counts: Sequence[int],
    tokenizer: PreTrainedTokenizerFast,
    image_marks: Sequence[str] | None = None,
) -> Encoded:
    """Tokens and labels of a conversation; the k-th `<image>` becomes `image_token_counts[k]` image tokens.

    image_marks: the family's text for each image, with one `<image>` or more, each of which becomes an equal share of
    the image's tokens. None: `<image>` alone.
    """
    marks = [IMAGE_TOKEN] * len(image_token_counts) if image_marks is None else image_marks
    left = iter(marks)
    text, end = tokenizer.bos_token or "", tokenizer.eos_token  # slow attributes of transformers' tokenizers
    answers = []  # character ranges that count in the loss
    for turn in turns:
        text += f"{QUESTION_PREFIX}{_written(turn.question, left)}{ANSWER_PREFIX}"
        start = len(text)
        text += f" {turn.answer}{end}"
        answers.append((start, len(text)))
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    ids, starts = encoding.ids, [start for start, _ in encoding.offsets]
    labels = [IGNORED] * len(ids)
    for start, stop in answers:
        first, last = bisect_left(starts, start), bisect_left(starts, stop)
        labels[first:last] = ids[first:last]
    return _with_images(ids, labels, image_token_counts, marks, tokenizer)


def prompt(
    question: str,
    image_token_counts: Sequence[int],
    tokenizer: PreTrainedTokenizerFast,
    image_marks: Sequence[str] | None = None,
) -> list[int]:
    """Tokens that ask one question about a sample's images.

    Images go where the question marks them, or before it when it does not mark all of them (a later turn).
    """
    marks = [IMAGE_TOKEN] * len(image_token_counts) if image_marks is None else image_marks
    if question.count(IMAGE_TOKEN) != len(image_token_counts):
        bare = question.replace(f"{IMAGE_TOKEN}\n", "").replace(IMAGE_TOKEN, "").strip()
        question = f"{IMAGE_TOKEN}\n" * len(image_token_counts) + bare
    text = f"{tokenizer.bos_token or ''}{QUESTION_PREFIX}{_written(question, iter(marks))}{ANSWER_PREFIX}"
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return _with_images(ids, [IGNORED] * len(ids), image_token_counts, marks, tokenizer).input_ids


def _written(question: str, marks: Iterator[str]) -> str:
    """The question with each `<image>` replaced by the next mark."""
    first, *behind = question.split(IMAGE_TOKEN)
    return first + "".join(f"{next(marks)}{text}" for text in behind)


def _with_images(
    ids: list[int], labels: list[int], counts: Sequence[int], marks: Sequence[str], tokenizer: PreTrainedTokenizerFast
) -> Encoded:
    """Repeat the image tokens of the k-th mark to `counts[k]` in all."""
    image_token = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    places = [position for position, token in enumerate(ids) if token == image_token]
    parts = [mark.count(IMAGE_TOKEN) for mark in marks]
    shares = [count // part for count, part in zip(counts, parts, strict=True) for _ in range(part)]
    assert len(places) == len(shares), f"{len(places)} image tokens, {len(shares)} in the marks of the images"
    for position, count in zip(reversed(places), reversed(shares), strict=True):
        ids[position : position + 1] = [image_token] * count
        labels[position : position + 1] = [IGNORED] * count
    return Encoded(ids, labels)


def make_tokenizer(
    name: str,
    texts: Iterable[str],
    image_mark: str = IMAGE_TOKEN,
    *,
    control_tokens: Iterable[str] = (),
    has_mark: bool = False,
) -> PreTrainedTokenizerFast:
    """The tokenizer that `model.tokenizer` names, with the tokens and the chat template of the format.

    Raises ConfigError for a bad N and for missing tokens, UserError (exit 69) when a hub id or folder cannot be loaded.

    Args:
        texts: training texts, consumed only for `train:N`.
        image_mark: the family's text for an image: `<image>`, perhaps between tokens of its own.
        control_tokens: further tokens of the family.
        has_mark: a pretrained tokenizer must already have all these tokens.
    """
    around = _around(image_mark, control_tokens)
    if name.startswith(TRAINED_PREFIX):
        tokenizer = _train(trained_size(name, image_mark, control_tokens), texts, around)
    else:
        tokenizer = _pretrained(name, around, has_mark=has_mark)
    tokenizer.chat_template = CHAT_TEMPLATE.replace(IMAGE_TOKEN, image_mark)
    return tokenizer


def trained_size(name: str, image_mark: str = IMAGE_TOKEN, control_tokens: Iterable[str] = ()) -> int:
    """N of `train:N`. Raises ConfigError for one that leaves no room for bytes and control tokens."""
    num_specials = len(SPECIALS) + len(_around(image_mark, control_tokens))
    smallest, size = BYTES_ALPHABET + num_specials, name.removeprefix(TRAINED_PREFIX)
    if not size.isdecimal() or int(size) < smallest:
        raise ConfigError(
            f"model.tokenizer {name!r} is not a size that a tokenizer can be trained to",
            expected=f"train:N with N at least {smallest} ({BYTES_ALPHABET} bytes and {num_specials} control tokens)",
        )
    return int(size)


def _around(image_mark: str, control_tokens: Iterable[str]) -> list[str]:
    """Control tokens of images beside the image token itself."""
    tokens = dict.fromkeys((*CONTROL_TOKEN.findall(image_mark), *control_tokens))
    return [token for token in tokens if token != IMAGE_TOKEN]


def training_texts(turns: Iterable[Turn]) -> Iterable[str]:
    """Training texts of a tokenizer: questions and answers, split as pre-tokenization would split them."""
    for turn in turns:
        yield f"{QUESTION_PREFIX}{turn.question.replace(IMAGE_TOKEN, '')}{ANSWER_PREFIX}"
        yield f" {turn.answer}"


def load_tokenizer(storage: Storage) -> PreTrainedTokenizerFast:
    """The tokenizer saved with prepared data."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        for info in storage.list(FOLDER):
            Path(scratch, Path(info.name).name).write_bytes(storage.read(info.name))
        return AutoTokenizer.from_pretrained(scratch, trust_remote_code=False)


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


def _pretrained(name: str, around: list[str], *, has_mark: bool) -> Any:
    from transformers import AutoTokenizer

    folder = local_folder(name, weights=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder or name, use_fast=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if known := hub_error(error, name, "", "tokenizer.json"):
            raise known from error
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
    lacking = [token for token in (IMAGE_TOKEN, *around) if token not in tokenizer.get_vocab()]
    if has_mark and lacking:
        more = f" and {len(lacking) - FEW} more" if len(lacking) > FEW else ""
        raise ConfigError(
            f"model.tokenizer {name!r} lacks {', '.join(lacking[:FEW])}{more}, which the model sees an image by",
            expected="a tokenizer with these tokens, such as that of model.pretrained",
        )
    missing = {"pad_token": PAD, "eos_token": EOS}
    tokenizer.add_special_tokens({kind: token for kind, token in missing.items() if getattr(tokenizer, kind) is None})
    tokenizer.add_special_tokens({"extra_special_tokens": [IMAGE_TOKEN, *around]}, replace_extra_special_tokens=False)
    return tokenizer
