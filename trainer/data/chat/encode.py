"""Tokens and labels of conversations, in a model's chat template.

The tokens are those of transformers' `processor.apply_chat_template(tokenize=True)`. Labels are the answers and the
tokens that end them, found by character position in the one tokenization.
"""

from __future__ import annotations

import dataclasses
import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.chat.layout import NO_ANSWER, ChatTemplate, Layout, refused
from vlmpipe.trainer.data.chat.messages import (
    Message,
    as_chat,
    context_answers,
    messages_of,
    shape_of,
    texts_of,
    tools_of,
)
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.tokenize import FOLDER, load_tokenizer, lost_characters, own_template
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.image_tokens import SQUARES, ImageForm
from vlmpipe.trainer.storage.base import Storage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

IGNORED = -100  # label of a token that does not count in the loss
SETTINGS = "chat.json"  # beside the tokenizer
TURN_TOKEN = re.compile(r"im_start|im_end|start_header|end_header|eot|eom|endoftext|image|vision|video|pad\b|turn")
MAX_SHAPES = 4096  # of conversations whose layouts are kept


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of one sample, and as many labels: -100 except on answers that are learned and their end tokens.

    lost: characters of the text, without white space, that no token stands for.
    rejected_from: of the two conversations of a pair, one after the other, the first token of the second one.
    """

    input_ids: list[int]
    labels: list[int]
    lost: str = ""
    rejected_from: int = 0

    def conversations(self) -> tuple[Encoded, Encoded]:
        """The chosen and the rejected conversation of a pair."""
        at = self.rejected_from
        return Encoded(self.input_ids[:at], self.labels[:at]), Encoded(self.input_ids[at:], self.labels[at:])

    def ends_of_labels(self) -> list[int]:
        """The number of tokens up to the end of each run of labels."""
        return [
            place + 1
            for place, (label, following) in enumerate(zip(self.labels, [*self.labels[1:], IGNORED], strict=True))
            if label != IGNORED and following == IGNORED
        ]

    @property
    def label_tokens(self) -> int:
        return len(self.labels) - self.labels.count(IGNORED)


class Chat:
    """A tokenizer and the chat template that a run's conversations are written in. Safe to use from several threads.

    as_text: contents are texts with the image token in place of each image, for templates that know no images. The
    format of models trained from scratch is used so too: a text is then written as it is, line ends beside marks too.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        form: ImageForm = SQUARES,
        *,
        end_tokens: Sequence[str] = (),
        added_end: str = "",
        as_text: bool = True,
        is_proved: bool = False,
    ) -> None:
        self.tokenizer, self.form, self.as_text = tokenizer, form, as_text
        self.end_tokens = tuple(end_tokens) or (added_end or str(tokenizer.eos_token),)
        self.placeholder = form.placeholder_in(tokenizer)
        self._image_token = form.published.image_token if form.published else self.placeholder
        source = str(tokenizer.get_chat_template())
        self._is_own = source == own_template(tokenizer, form)
        self.template = ChatTemplate(
            source=source,
            special_tokens=tuple(tokenizer.special_tokens_map.items()),
            placeholder=self.placeholder,
            end_tokens=self.end_tokens,
            added_end=added_end,
            as_text=as_text,
            is_trusted=is_proved or self._is_own,
        )
        self.image_token_id = int(tokenizer.convert_tokens_to_ids(self._image_token))
        video_token = form.videos.token if form.videos else ""
        video_token_id = tokenizer.backend_tokenizer.token_to_id(video_token) if video_token else None
        # Of images, and of videos where the tokenizer has one.
        self.vision_token_ids = [self.image_token_id, *([] if video_token_id is None else [video_token_id])]
        self._vision_token = re.compile("|".join(map(re.escape, filter(None, (self._image_token, video_token)))))
        self.end_token_ids = [int(token) for token in tokenizer.convert_tokens_to_ids(list(self.end_tokens))]
        # Attributes of transformers' tokenizers are slow.
        self._bos, self._backend = tokenizer.bos_token, tokenizer.backend_tokenizer
        self._unknown_id = tokenizer.unk_token_id
        self.layout = lru_cache(MAX_SHAPES)(self.template.layout)

    @classmethod
    def load(cls, storage: Storage, form: ImageForm, *, is_proved: bool = False) -> Chat:
        """The chat saved with prepared data. `is_proved`: preparation has rendered what will be rendered."""
        settings = json.loads(storage.read(f"{FOLDER}/{SETTINGS}"))
        return cls(load_tokenizer(storage), form, is_proved=is_proved, **settings)

    def save(self, folder: Path) -> None:
        """Write tokenizer, template and settings."""
        self.tokenizer.save_pretrained(folder)
        settings = {
            "end_tokens": self.end_tokens, "added_end": self.template.added_end, "as_text": self.as_text
        }  # fmt: skip
        (folder / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")

    @cached_property
    def control_tokens(self) -> tuple[str, ...]:
        """Tokens that no text of a sample may spell: they would end turns or stand for images."""
        special = (str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special)
        tokens = dict.fromkeys((*self.tokenizer.all_special_tokens, *special, self.placeholder))
        return tuple(token for token in tokens if token != IMAGE_TOKEN)

    def forbidden_tokens(self, allowed: Sequence[str]) -> tuple[str, ...]:
        """The control tokens without those that `data.allowed_tokens` names.

        Raises ConfigError for one that is no control token, or that ends turns, pads or stands for images.
        """
        tokens = {*self.end_tokens, *self.tokenizer.special_tokens_map.values(), self.placeholder, self._image_token}
        fixed = {token for token in tokens if isinstance(token, str)}
        fixed |= {str(token) for token in self.tokenizer.convert_ids_to_tokens(self.vision_token_ids)}
        for token in allowed:
            if token not in self.control_tokens or token in fixed or TURN_TOKEN.search(token):
                known = [
                    control_token
                    for control_token in self.control_tokens
                    if control_token not in fixed and not TURN_TOKEN.search(control_token)
                ]
                raise ConfigError(
                    f"data.allowed_tokens has {token!r}, which "
                    + (
                        "is no control token of the tokenizer"
                        if token not in self.control_tokens
                        else "texts may not spell"
                    ),
                    expected="control tokens such as " + (", ".join(known[:8]) or "none: this tokenizer has no others"),
                )
        return tuple(token for token in self.control_tokens if token not in allowed)

    @cached_property
    def longest_token_chars(self) -> int:
        """Characters of the longest token, as the vocabulary writes it."""
        return max(map(len, self._backend.get_vocab()), default=1)

    def messages(self, turns: Sequence[Turn]) -> list[Message]:
        return messages_of(turns, self.placeholder if self.as_text else None)

    def encode(
        self, turns: Sequence[Turn], counts: Sequence[int], sizes: Sequence[tuple[int, int]] | None = None
    ) -> Encoded:
        """Tokens and labels of a conversation.

        Raises RejectedError naming what the template does not allow.

        Args:
            counts: tokens of each image.
            sizes: (width, height) of each image in pixels; None: images are one token, repeated.
        """
        return self.encode_messages(self.messages(turns), counts, sizes)

    def encode_pair(
        self, turns: Sequence[Turn], counts: Sequence[int], sizes: Sequence[tuple[int, int]] | None = None
    ) -> tuple[Encoded, Encoded]:
        """The conversation with its last answer, and with the rejected one. Only these answers are labelled."""
        rejected = [*turns[:-1], dataclasses.replace(turns[-1], answer=turns[-1].rejected)]
        chosen, other = (self.encode(conversation, counts, sizes) for conversation in (turns, rejected))
        return _last_labelled(chosen), _last_labelled(other)

    def prompt(
        self,
        turn: Turn,
        counts: Sequence[int],
        sizes: Sequence[tuple[int, int]] | None = None,
        earlier: Sequence[Turn] = (),
    ) -> list[int]:
        """Tokens that ask a question about images: alone (`asked_question`), or after earlier turns and their answers,
        where all images are marked.
        """
        question = turn.question if earlier else asked_question(turn.question, len(counts))
        asked = self.messages([*earlier, dataclasses.replace(turn, question=question, answer="", calls="")])
        return self.encode_messages(asked, counts, sizes, is_prompt=True).input_ids

    def encode_messages(
        self,
        messages: Sequence[Message],
        counts: Sequence[int],
        sizes: Sequence[tuple[int, int]] | None = None,
        *,
        is_prompt: bool = False,
    ) -> Encoded:
        """Encode messages; with `is_prompt` the text ends with the generation prompt."""
        layout = self.layout(shape_of(messages), is_prompt=is_prompt)
        marks = self._marks(counts, sizes)
        text, answers = self._written(layout, list(texts_of(messages)), marks, context_answers(messages))
        begins_with_bos = bool(self._bos) and text.startswith(self._bos)
        encoding = self._backend.encode(text, add_special_tokens=not begins_with_bos)
        ids, offsets = encoding.ids, encoding.offsets
        starts, stops = [start for start, _ in offsets], [stop for _, stop in offsets]
        lost = lost_characters(text, ids, starts, stops, self.tokenizer, self._unknown_id)
        if len(offsets) > 1 and offsets[-1] == (0, 0):  # an end token that the tokenizer adds
            starts[-1] = stops[-1] = len(text)
        labels = [IGNORED] * len(ids)
        for start, stop in answers:
            first, last = bisect_left(starts, start), bisect_left(starts, stop)
            if (first and stops[first - 1] > start) or (last > first and stops[last - 1] > stop):
                beside = text[max(0, start - 9) : start + 9]
                raise refused(f"and this tokenizer let a token straddle the answer's boundary, beside {beside!r}")
            labels[first:last] = ids[first:last]
        parts = [len(self._vision_token.findall(mark)) for mark in marks]
        runs = list(counts) if sizes is None else self.form.runs(sizes, counts, parts)
        return dataclasses.replace(self._with_images(ids, labels, runs), lost=lost)

    def has_tokens(self, text: str) -> bool:
        """Return whether a text that is not blank has a character that the tokenizer knows; True for a blank one."""
        known = [
            token for token in self._backend.encode(text, add_special_tokens=False).ids if token != self._unknown_id
        ]
        return not text.strip() or bool(self.tokenizer.decode(known, clean_up_tokenization_spaces=False).strip())

    def answers(self, messages: Sequence[Message]) -> tuple[int, list[str]]:
        """The number of image tokens that the template writes, and the labelled text."""
        layout, texts = self.layout(shape_of(messages)), list(texts_of(messages))
        images = layout.rendered(texts).count(self.placeholder)
        text, answers = self._written(layout, texts, [self.placeholder] * images, context_answers(messages))
        return images, [text[start:stop] for start, stop in answers]

    def verify(self, messages: Sequence[Message]) -> None:
        """Render the conversation as a whole. Raises RejectedError where the template changes it by what texts say.

        Our own template writes every text as it is, so nothing is rendered.
        """
        if self._is_own:
            return
        layout, texts = self.layout(shape_of(messages)), list(texts_of(messages))
        if layout.rendered(texts) == self.template.render(as_chat(messages, layout.strings), tools=tools_of(messages)):
            return
        tags = "</think>" in "".join(texts)
        hint = ": thinking belongs into the answer's 'thinking' or 'reasoning_content'" if tags else ""
        raise refused(f"changes what these texts say{hint}")

    def _marks(self, counts: Sequence[int], sizes: Sequence[tuple[int, int]] | None) -> list[str]:
        """Text for each image, with one image token or more."""
        if sizes is None:
            return [self._image_token] * len(counts)
        marks = self.form.marks(sizes) if self.as_text else self.form.replacements(sizes)
        return [mark.replace(IMAGE_TOKEN, self._image_token) for mark in marks]

    def _written(
        self, layout: Layout, texts: Sequence[str], marks: Sequence[str], unlearned: frozenset[int]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The conversation with each image's mark, and the character ranges of labels: not of `unlearned` answers."""
        written: list[str] = []
        answers: list[tuple[int, int]] = []
        end, left = 0, iter(marks)
        for piece, answer in self._pieces(layout, texts, left):
            written.append(piece)
            start, end = end, end + len(piece)
            if answer != NO_ANSWER and answer not in unlearned and piece:
                if answers and answers[-1][1] == start:
                    start = answers.pop()[0]
                answers.append((start, end))
        assert next(left, None) is None, "fewer images in the text than marks"
        return "".join(written), answers

    def _pieces(self, layout: Layout, texts: Sequence[str], marks: Iterator[str]) -> Iterator[tuple[str, int]]:
        """Each text, and the number of the answer that it is a label of."""
        for segment in layout.segments:
            text = segment.strip(texts[segment.slot]) if segment.slot >= 0 else segment.literal
            if self.placeholder not in text:
                yield text, segment.answer
                continue
            first, *after = text.split(self.placeholder)
            yield first, segment.answer
            for other in after:
                yield next(marks), NO_ANSWER
                yield other, segment.answer

    def _with_images(self, ids: list[int], labels: list[int], runs: Sequence[int]) -> Encoded:
        """Repeat the k-th token of an image or a video to `runs[k]` in all."""
        seen = self.vision_token_ids
        places = [position for position, token in enumerate(ids) if token in seen] if runs else []
        assert len(places) == len(runs), f"{len(places)} image tokens, {len(runs)} in the marks of the images"
        for position, count in zip(reversed(places), reversed(runs), strict=True):
            ids[position : position + 1] = [ids[position]] * count
            labels[position : position + 1] = [IGNORED] * count
        return Encoded(ids, labels)


def asked_question(question: str, images: int) -> str:
    """The question with its images where it marks them, or before it where not all are marked, as in a later turn."""
    if question.count(IMAGE_TOKEN) == images:
        return question
    bare = question.replace(f"{IMAGE_TOKEN}\n", "").replace(IMAGE_TOKEN, "").strip()
    return f"{IMAGE_TOKEN}\n" * images + bare


def _last_labelled(encoded: Encoded) -> Encoded:
    """Keep the labels of the last answer only."""
    labels, end = encoded.labels, len(encoded.labels)
    while end and labels[end - 1] == IGNORED:
        end -= 1
    start = end
    while start and labels[start - 1] != IGNORED:
        start -= 1
    return dataclasses.replace(encoded, labels=[IGNORED] * start + labels[start:])
