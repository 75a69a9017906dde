"""Fits a record's turns into packed sequences: all of them, the first ones, or in pieces."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.chat.encode import Chat, Encoded
from vlmpipe.trainer.data.conversations.independent import independent_spans
from vlmpipe.trainer.data.prepare.validation.checks import CheckedImage
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.models.image_tokens import sample_image_tokens

MAX_TURNS = 2000  # of a conversation that are looked at for one piece of it
PIECE_AHEAD = 3  # times the characters of a piece of a conversation that are tokenized for the next one


@dataclass(frozen=True, slots=True)
class Fitted:
    """The first turns of a conversation that fit into a sequence, with their images."""

    turns: tuple[Turn, ...]
    images: tuple[CheckedImage, ...]
    counts: tuple[int, ...]  # tokens of each image
    encoded: Encoded


def marks_in(turns: Sequence[Turn]) -> int:
    return sum(text.count(IMAGE_TOKEN) for turn in turns for text in turn.texts())


def _continued(turns: Sequence[Turn], start: int, shown: int, max_chars: int) -> tuple[Turn, ...]:
    """The turns from number `start` on, as a conversation of its own, up to about `max_chars` characters; 0: all.

    It begins with the system text, the tools and the `shown` images of the turns before.
    """
    following, chars = [turns[start]], 0
    for turn in turns[start + 1 : start + MAX_TURNS]:
        chars += sum(map(len, turn.texts()))
        if max_chars and chars > max_chars:
            break
        following.append(turn)
    if not start:
        return tuple(following)
    first = following[0]
    question = f"{IMAGE_TOKEN}\n" * shown + first.question
    begun = replace(first, question=question, system=first.system or turns[0].system, tools=turns[0].tools)
    return (begun, *following[1:])


def _with_results(turns: Sequence[Turn], start: int, count: int) -> int:
    """The most of `count` turns from number `start` on after which no result of a call follows; one at least."""
    while count > 1 and start + count < len(turns) and turns[start + count].results:
        count -= 1
    return count


class TurnFitter:
    """Fits turns by the run's policy. Called in several threads at once."""

    def __init__(self, config: JobConfig, chat: Chat) -> None:
        self._data, self._chat, self._in_pairs = config.data, chat, config.train.in_pairs
        self._image_tokens = sample_image_tokens(config.model)

    @property
    def divides(self) -> bool:
        """Return whether a record may become several samples."""
        return self._splits or self.is_independent

    @property
    def is_independent(self) -> bool:
        """Return whether each turn becomes a sample of its own."""
        return self._data.turns == "independent" and not self._in_pairs

    @property
    def _splits(self) -> bool:
        return self._data.overlong_policy == "split" and not self._in_pairs

    def pieces(
        self, turns: tuple[Turn, ...], images: Sequence[CheckedImage], counts: Sequence[int]
    ) -> list[tuple[int, Fitted]]:
        """The samples of a record, each with the number of its first turn, from 0; `counts` are its images' tokens.

        Raises RejectedError where none fits.
        """
        if self.is_independent:
            return self._independent(turns, images)
        return self._divided(turns, images) if self._splits else [(0, self._fit(turns, images, counts))]

    def _fit(
        self, turns: tuple[Turn, ...], images: Sequence[CheckedImage], counts: Sequence[int] | None = None
    ) -> Fitted:
        """The first turns that fit, all where they are not to be dropped. Raises RejectedError where none do.

        counts: tokens of each image, where they are known.
        """
        sizes = [image.size for image in images]
        counts = self.counts(sizes) if counts is None else counts
        encoded = self.encoded(turns, counts, sizes)
        most = self._data.sequence_length
        while len(encoded.input_ids) > most:
            fitting = self._fitting(encoded, turns) if self._may_drop(turns) else len(turns)
            if fitting == len(turns):
                message = f"{len(encoded.input_ids)} tokens, more than data.sequence_length {most}"
                raise RejectedError(RejectCode.CONV_TOO_LONG, message)
            turns = turns[:fitting]
            images = images[: marks_in(turns)]
            sizes = [image.size for image in images]
            counts = self.counts(sizes)
            encoded = self.encoded(turns, counts, sizes)
        if not encoded.label_tokens:
            message = f"no answer that is learned within data.sequence_length {most}"
            raise RejectedError(RejectCode.CONV_TOO_LONG, message)
        return Fitted(turns, tuple(images), tuple(counts), encoded)

    def _divided(self, turns: tuple[Turn, ...], images: Sequence[CheckedImage]) -> list[tuple[int, Fitted]]:
        """The conversation in pieces that fit, each with the number of its first turn, from 0.

        A turn that does not fit with the images before it is left out. Raises RejectedError where none fits.
        """
        pieces: list[tuple[int, Fitted]] = []
        problem: RejectedError | None = None
        marks = [0, *accumulate(marks_in([turn]) for turn in turns)]
        max_chars, start = 0, 0
        while start < len(turns) and not all(turn.is_context for turn in turns[start:]):
            piece = _continued(turns, start, marks[start], max_chars)
            try:
                piece = self.short_enough(piece)
                fitted = self._fit(piece, images[: marks_in(piece)])
                if len(fitted.turns) != (whole := _with_results(turns, start, len(fitted.turns))):
                    fitted = self._fit(piece[:whole], images[: marks_in(piece[:whole])])
                pieces.append((start, fitted))
                max_chars = PIECE_AHEAD * sum(len(text) for turn in fitted.turns for text in turn.texts())
                start += len(fitted.turns)
            except RejectedError as error:
                if error.code != RejectCode.CONV_TOO_LONG:
                    raise
                problem = problem or error
                max_chars = PIECE_AHEAD * sum(map(len, turns[start].texts()))
                start += 1
            while start < len(turns) and turns[start].results:  # of a call that is left out
                start += 1
        if not pieces:
            assert problem
            raise problem
        return pieces

    def _independent(self, turns: tuple[Turn, ...], images: Sequence[CheckedImage]) -> list[tuple[int, Fitted]]:
        """Each turn with the images up to it, and the turn's number, from 0.

        A turn that does not fit is left out, unless the policy is to reject. Raises RejectedError where none fits.
        """
        pieces: list[tuple[int, Fitted]] = []
        problem: RejectedError | None = None
        marks = [0, *accumulate(marks_in([turn]) for turn in turns)]
        for start, stop in independent_spans(turns):
            piece = _continued(turns[:stop], start, marks[start], 0)
            try:
                pieces.append((start, self._fit(self.short_enough(piece), images[: marks[stop]])))
            except RejectedError as error:
                if error.code != RejectCode.CONV_TOO_LONG or self._data.overlong_policy == "reject":
                    raise
                problem = problem or error
        if not pieces:
            assert problem
            raise problem
        return pieces

    def _may_drop(self, turns: Sequence[Turn]) -> bool:
        return self._data.overlong_policy != "reject" and len(turns) > 1 and not self._in_pairs

    def _fitting(self, encoded: Encoded, turns: Sequence[Turn]) -> int:
        """How many of the turns fit up to an answer that is learned, by the tokens up to the end of each; all but one
        where that is not known.
        """
        ends = encoded.ends_of_labels()
        learned = [number for number, turn in enumerate(turns, 1) if not turn.is_context]
        if len(ends) != len(learned):  # images in answers divide labels
            return len(turns) - 1
        fits = max(1, bisect_right(ends, self._data.sequence_length))
        # Of a last answer that fits, what the template writes after it may not.
        return next((number for number in reversed(learned[:fits]) if number < len(turns)), len(turns))

    def short_enough(self, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
        """The first turns whose texts may fit by their number of characters, before they take time and memory.

        Normal forms of Unicode join at most four characters. Raises RejectedError.
        """
        most = 4 * self._data.sequence_length * self._chat.longest_token_chars
        chars = list(accumulate(sum(map(len, turn.texts())) for turn in turns))
        if chars[-1] <= most:
            return turns
        count = max(1, bisect_right(chars, most))
        if chars[0] > most or not self._may_drop(turns):
            tokens = self._data.sequence_length
            message = f"{chars[-1]:,} characters, which {tokens} tokens (data.sequence_length) cannot hold"
            raise RejectedError(RejectCode.CONV_TOO_LONG, message)
        return turns[:count]

    def counts(self, sizes: Sequence[tuple[int, int]]) -> list[int]:
        try:
            return self._image_tokens(sizes)
        except ValueError as error:
            raise RejectedError(RejectCode.IMAGE_ASPECT, str(error)) from error

    def encoded(self, turns: tuple[Turn, ...], counts: Sequence[int], sizes: Sequence[tuple[int, int]]) -> Encoded:
        """Return the tokens of a sample; of a preference pair, both conversations one after the other."""
        self._chat.verify(self._chat.messages(turns))
        if not self._in_pairs:
            return self._chat.encode(turns, counts, sizes)
        self._chat.verify(self._chat.messages([*turns[:-1], replace(turns[-1], answer=turns[-1].rejected)]))
        chosen, rejected = self._chat.encode_pair(turns, counts, sizes)
        return Encoded(
            chosen.input_ids + rejected.input_ids,
            chosen.labels + rejected.labels,
            chosen.lost + rejected.lost,
            rejected_from=len(chosen.input_ids),
        )
