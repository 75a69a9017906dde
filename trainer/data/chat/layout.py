"""Where a chat template puts the texts of a conversation, and the parts of its own that are labels.

A conversation is rendered with a private-use character in place of each text. These marks divide the rendering into
literal pieces, which depend only on the conversation's shape and are kept for it. Placing the texts between the pieces
takes microseconds; rendering takes up to half a millisecond.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

from vlmpipe.trainer.data.chat import render, render_process
from vlmpipe.trainer.data.chat.messages import Message, Role, Shape, as_chat, described, filled, tools_of
from vlmpipe.trainer.data.chat.render import DATE_MARK
from vlmpipe.trainer.data.chat.tools import lacking_tools
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError

FIRST_MARK = 0xE000  # private use
LAST_MARK = ord(DATE_MARK)
MAX_TEXTS = 6000  # as many marks as there are below DATE_MARK
# White space around a text, to see which of it a template strips. Different ones, so that no two readings are equal.
BEFORE, AFTER = "\n \n", "\n\t\n"
# What is left of BEFORE and of AFTER by each kind of stripping.
LEFT: dict[str, Callable[[str], str]] = {BEFORE: str, "": str.lstrip, " \n": lambda text: text.lstrip("\n")}
RIGHT: dict[str, Callable[[str], str]] = {AFTER: str, "": str.rstrip, "\n\t": lambda text: text.rstrip("\n")}
# Contents of these roles are given as strings where they are one text: the first that the template takes is used.
ALL_ROLES: frozenset[Role] = frozenset({"system", "user", "assistant"})
CONTENT_FORMS: tuple[frozenset[Role], ...] = (frozenset(), frozenset({"system"}), ALL_ROLES)

NO_ANSWER = -1

Render = Callable[..., str]  # (messages, add_generation_prompt=...) -> text


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a rendering: literal text, or the place of a text."""

    literal: str = ""
    slot: int = -1  # number of the text; -1: literal
    strip: Callable[[str], str] = str
    answer: int = NO_ANSWER  # number of the answer that this is a label of, from 0
    is_added: bool = False  # an end token that the template does not write


@dataclass(frozen=True, slots=True)
class Layout:
    """How a template renders conversations of one shape."""

    segments: tuple[Segment, ...]
    strings: frozenset[Role]  # roles whose text-only contents are given as strings
    starts_at_prompt: bool = True  # labels start where the prompt of their turn ends

    def rendered(self, texts: Sequence[str]) -> str:
        """The conversation as the template renders it."""
        return "".join(
            segment.strip(texts[segment.slot]) if segment.slot >= 0 else segment.literal
            for segment in self.segments
            if not segment.is_added
        )


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the tokens that it writes.

    placeholder: written for an image. end_tokens: end an answer. added_end: appended to answers without one.
    as_text: contents are always one string, with placeholders in it.
    is_trusted: rendered in this process: it is ours, or preparation has rendered what is rendered now.
    """

    source: str
    special_tokens: tuple[tuple[str, str], ...]  # names and tokens that the template may use
    placeholder: str
    end_tokens: tuple[str, ...]
    added_end: str = ""
    as_text: bool = False
    is_trusted: bool = False

    def render(self, chat: list[dict[str, object]], *, tools: str = "", add_generation_prompt: bool = False) -> str:
        """Render as transformers does, except for the date. Raises RejectedError for what the template refuses."""
        rendering = render.render if self.is_trusted else render_process.render
        tokens = dict(self.special_tokens)
        try:
            return rendering(self.source, chat, tokens, tools=tools, add_generation_prompt=add_generation_prompt)
        except render.TemplateError as error:
            raise refused(str(error)) from error

    def layout(self, shape: Shape, *, is_prompt: bool = False) -> Layout:
        """How conversations of this shape are rendered. `is_prompt`: with the generation prompt, and no labels.

        Raises RejectedError naming what the template leaves out, changes or does not allow.
        """
        first: RejectedError | None = None
        for strings in (ALL_ROLES,) if self.as_text else CONTENT_FORMS:
            try:
                return _Reading(self, shape, strings, is_prompt).layout()
            except RejectedError as error:
                first = first or error
        assert first
        raise first


def refused(problem: str) -> RejectedError:
    return RejectedError(RejectCode.CONV_TEMPLATE, f"the chat template {problem}")


class _Reading:
    """One way to give conversations of a shape to a template, and what it makes of them."""

    def __init__(self, template: ChatTemplate, shape: Shape, strings: frozenset[Role], is_prompt: bool) -> None:
        self._template, self._shape, self._strings, self._is_prompt = template, shape, strings, is_prompt
        self._names = described(shape)
        if len(self._names) > MAX_TEXTS:
            raise refused(f"is not read for conversations of more than {MAX_TEXTS} texts")
        self._marks = [chr(FIRST_MARK + number) for number in range(len(self._names))]
        self._marked = filled(shape, self._marks)

    def layout(self) -> Layout:
        text = self._rendered(self._marked)
        if DATE_MARK in text:
            raise refused("writes the date of the day here: give every conversation a system text")
        pieces = self._pieces(text)
        images = sum(not is_text for message in self._shape for is_text in message.are_texts)
        if (written := sum(piece.count(self._template.placeholder) for piece in pieces)) != images:
            raise refused(f"writes {written} images of {images}" + self._in_answers())
        if lacking := lacking_tools(self._shape, pieces):
            raise refused(f"leaves out {lacking}")
        strips = self._strips(pieces)
        labels, starts_at_prompt = self._labels(text, pieces)
        return Layout(tuple(self._segments(pieces, strips, labels)), self._strings, starts_at_prompt)

    def _rendered(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        return self._template.render(
            as_chat(messages, self._strings),
            tools=tools_of(messages),
            add_generation_prompt=prompt or self._is_prompt,
        )

    def _pieces(self, text: str) -> list[str]:
        """The literal text before each mark and after the last."""
        pieces, start = [], 0
        counts = Counter(character for character in text if FIRST_MARK <= ord(character) < LAST_MARK)
        places = self._places(text)
        for mark, name in zip(self._marks, self._names, strict=True):
            if (count := counts[mark]) != 1:
                raise refused(f"{'repeats' if count else 'leaves out'} {name}" + self._of_turns(name))
            place = places[mark]
            if place < start:
                raise refused(f"puts {name} before what comes first")
            pieces.append(text[start:place])
            start = place + 1
        return [*pieces, text[start:]]

    def _places(self, text: str) -> dict[str, int]:
        """Where each mark is, in one pass: there may be thousands."""
        return {character: place for place, character in enumerate(text) if FIRST_MARK <= ord(character) < LAST_MARK}

    def _of_turns(self, name: str) -> str:
        earlier = "thinking" in name and self._names[-1].rpartition(" ")[2] != name.rpartition(" ")[2]
        return ", once another turn follows: end the conversation there" if earlier else ""

    def _in_answers(self) -> str:
        answers = any(message.role == "assistant" and not all(message.are_texts) for message in self._shape)
        return ": those in answers may be what it leaves out" if answers else ""

    def _strips(self, pieces: Sequence[str]) -> list[Callable[[str], str]]:
        """Characters that the template strips of each text."""
        if not self._marks:
            return []
        text = self._rendered(filled(self._shape, [f"{BEFORE}{mark}{AFTER}" for mark in self._marks]))
        between_marks = re.split(f"[{self._marks[0]}-{self._marks[-1]}]", text)
        if len(between_marks) != len(pieces):
            raise refused("changes texts")
        sides: list[tuple[str, str]] = []  # left after and before each piece
        for number, (piece, between) in enumerate(zip(pieces, between_marks, strict=True)):
            after, before = RIGHT if number else [""], LEFT if number < len(self._marks) else [""]
            fitting = [both for both in product(after, before) if both[0] + piece + both[1] == between]
            if not fitting:
                raise refused(f"changes {self._names[min(number, len(self._names) - 1)]}")
            sides.append(fitting[0])
        return [_both(LEFT[before], RIGHT[after]) for (_, before), (after, _) in pairwise(sides)]

    def _labels(self, text: str, pieces: Sequence[str]) -> tuple[_Labels, bool]:
        """Label positions, and whether every answer's labels start where the prompt of its turn ends.

        The prompt is rendered for the last answer, and for one of each literal text that stands before an answer: a
        rendering takes time in proportion to the turns, and equal texts before answers divide equally.
        """
        labels, at_prompt, slot = _Labels(), True, 0
        places = self._places(text)
        ends_of_pieces = [places[mark] for mark in self._marks]
        last = max((n for n, message in enumerate(self._shape) if message.role == "assistant"), default=0)
        ends_of_prompts: dict[str, int | None] = {}  # in the piece before the answer; None: not in it
        openings: set[str] = set()  # before answers that only call tools
        answer = NO_ANSWER
        for number, message in enumerate(self._shape):
            first, slot = slot, slot + message.num_texts
            answer += message.role == "assistant"
            if message.role != "assistant" or self._is_prompt:
                continue
            if first == slot:
                if message.calls:
                    begin = self._start_of_calls(text, pieces, number, slot, openings)
                    labels.add(slot, begin, self._end_of_calls(pieces[slot], begin, answer), answer)
                continue
            labels.texts.update(dict.fromkeys(range(first, slot), answer))
            end_of_piece = ends_of_pieces[first]
            start_of_piece = end_of_piece - len(pieces[first])
            if number == last or pieces[first] not in ends_of_prompts:
                prompt = self._rendered(self._marked[:number], prompt=True) if number else ""
                is_in = prompt and text.startswith(prompt) and start_of_piece <= len(prompt) <= end_of_piece
                ends_of_prompts[pieces[first]] = len(prompt) - start_of_piece if is_in else None
            start = ends_of_prompts[pieces[first]]
            if start is None:
                at_prompt = False
            elif self._template.placeholder not in pieces[first][start:]:
                labels.add(first, start, len(pieces[first]), answer)
            for inner in range(first + 1, slot):
                if self._template.placeholder not in pieces[inner]:
                    labels.add(inner, 0, len(pieces[inner]), answer)
            if message.calls:
                labels.add(slot, 0, self._end_of_calls(pieces[slot], 0, answer), answer)
            elif end := self._end(pieces[slot], self._names[slot - 1]):
                labels.add(slot, *end, answer)
            else:
                labels.added[slot] = answer
        return labels, at_prompt

    def _start_of_calls(self, text: str, pieces: Sequence[str], number: int, slot: int, openings: set[str]) -> int:
        """Where an answer without a text begins in its piece: where the prompt of its turn ends.

        openings: the literal texts before such answers so far. The prompt is rendered for the first with each.
        """
        piece = pieces[slot]
        if known := next((opening for opening in openings if piece.startswith(opening)), ""):
            return len(known)
        before = sum(map(len, pieces[:slot])) + slot  # a mark is one character
        prompt = self._rendered(self._marked[:number], prompt=True)
        start = len(prompt) - before
        if not text.startswith(prompt) or not 0 < start <= len(piece):
            raise refused("writes a call of a tool where no prompt leads to it")
        openings.add(piece[:start])
        return start

    def _end_of_calls(self, piece: str, start: int, answer: int) -> int:
        """Where the end token after an answer's calls of tools ends."""
        ends = "|".join(map(re.escape, self._template.end_tokens))
        if match := re.compile(ends).search(piece, start):
            return match.end()
        raise refused(f"writes no end token after the calls of answer {answer + 1} (of {ends})")

    def _end(self, piece: str, name: str) -> tuple[int, int] | None:
        """Range of the end token in what follows an answer's last text; None where it is to be added."""
        ends, image = "|".join(map(re.escape, self._template.end_tokens)), re.escape(self._template.placeholder)
        if match := re.match(rf"((?:\s|{image}|<[^<>]+>{image}<[^<>]+>)*?)({ends})", piece):
            return (match.start(2) if match[1].strip() else 0), match.end(2)
        if self._template.added_end:
            return None
        known = ", ".join(self._template.end_tokens)
        raise refused(f"writes no end token after {name} (of {known}): name one in data.answer_end")

    def _segments(
        self, pieces: Sequence[str], strips: Sequence[Callable[[str], str]], labels: _Labels
    ) -> Iterator[Segment]:
        for number, piece in enumerate(pieces):
            place = 0
            if number in labels.added:
                yield Segment(self._template.added_end, answer=labels.added[number], is_added=True)
            for start, stop, answer in sorted(labels.ranges.get(number, ())):
                if place < start:
                    yield Segment(piece[place:start])
                if start < stop:
                    yield Segment(piece[start:stop], answer=answer)
                place = stop
            if place < len(piece):
                yield Segment(piece[place:])
            if number < len(strips):
                yield Segment(slot=number, strip=strips[number], answer=labels.texts.get(number, NO_ANSWER))


@dataclass(frozen=True, slots=True)
class _Labels:
    """Labelled texts, labelled ranges of pieces, and at the start of which pieces an end token is added; of which
    answer each is.
    """

    texts: dict[int, int] = field(default_factory=dict)
    ranges: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    added: dict[int, int] = field(default_factory=dict)

    def add(self, piece: int, start: int, stop: int, answer: int) -> None:
        self.ranges.setdefault(piece, []).append((start, stop, answer))


def _both(left: Callable[[str], str], right: Callable[[str], str]) -> Callable[[str], str]:
    if left is str and right is str:
        return str
    return lambda text: left(right(text))
