"""Validates samples: id, images, tokens. The result is an accepted sample or a reject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.chat.encode import Chat, Encoded
from vlmpipe.trainer.data.conversations.grounding import MARKS, with_boxes
from vlmpipe.trainer.data.prefixes.prefix import Prefix, content_of, prefix_of, prefix_of_pair
from vlmpipe.trainer.data.prefixes.sharing import stores_prefixes
from vlmpipe.trainer.data.prepare.validation.checks import CheckedImage, check_clip, check_image, check_turns
from vlmpipe.trainer.data.prepare.validation.final_ids import Entry, reject_of
from vlmpipe.trainer.data.prepare.validation.fit_turns import Fitted, TurnFitter, marks_in
from vlmpipe.trainer.data.rejects import Reject, RejectCode, RejectedError, Repair
from vlmpipe.trainer.data.sample import PART_MARK, ImageRef, Sample, Split, Turn

SHOWN_CHARACTERS = 20
SHORT_CHARS = 2048  # of a conversation that is tokenized sooner than it is handed to a thread


@dataclass(frozen=True, slots=True)
class Accepted:
    """A sample that passed every check."""

    id: str
    where: str
    split: Split
    turns: tuple[Turn, ...]
    images: tuple[CheckedImage, ...]
    image_token_counts: tuple[int, ...]
    encoded: Encoded
    repairs: tuple[Repair, ...]
    prefix: Prefix | None  # None where no prefix is to be shared
    rest: tuple[Accepted, ...] = ()  # further samples of the same record

    @property
    def samples(self) -> tuple[Accepted, ...]:
        """All samples of the record."""
        return (self, *self.rest)


def image_bytes(record: Entry | Sample | Reject) -> int:
    """Memory that a record's images take."""
    if isinstance(record, Reject):
        return 0
    return (record.sample if isinstance(record, Entry) else record).image_bytes()


def is_short(record: Entry | Sample | Reject) -> bool:
    """Return whether a record has no image and little text, so that a thread of its own saves nothing."""
    if isinstance(record, Reject):
        return record.image is None
    sample = record.sample if isinstance(record, Entry) else record
    return not sample.images and sum(len(text) for turn in sample.turns for text in turn.texts()) <= SHORT_CHARS


def _images_in(image: ImageRef) -> int:
    """Return 1 for an image, the temporal patches for a video."""
    return image.clip.patches if image.clip else 1


def _described(images: Sequence[ImageRef]) -> str:
    patches = sum(image.clip.patches for image in images if image.clip)
    stills = sum(image.clip is None for image in images)
    return f"{stills} images" + (f" and {patches} patches in time of videos" if patches else "")


class SampleValidator:
    """All checks of one sample. Called in several threads at once."""

    def __init__(self, config: JobConfig, chat: Chat) -> None:
        self._data, self._chat, self._in_pairs = config.data, chat, config.train.in_pairs
        self._stores_prefixes = stores_prefixes(config)
        self._fitter = TurnFitter(config, chat)
        self._control_tokens = chat.forbidden_tokens(config.data.allowed_tokens)

    def __call__(self, entry: Entry | Reject) -> Accepted | Reject:
        if isinstance(entry, Reject):
            return entry
        try:
            return self._accept(entry)
        except RejectedError as error:
            return reject_of(entry.sample, error.code, str(error))

    def _accept(self, entry: Entry) -> Accepted:
        sample, repairs = entry.sample, list(entry.repairs)
        turns = self._checked_pair(sample.turns)
        check_turns(turns, len(sample.images), self._control_tokens)
        if not self._fitter.divides and (dropped := len(turns) - len(turns := self._fitter.short_enough(turns))):
            sample = replace(sample, images=sample.images[: marks_in(turns)])
            repairs += [Repair.TURNS_DROPPED] * dropped
        shown = 1 + self._in_pairs  # times that an image is in a packed sequence
        self._require_few(shown * sum(map(_images_in, sample.images)), _described(sample.images))
        images = [self._checked(reference) for reference in sample.images]
        repairs += [repair for image in images for repair in image.repairs]
        sizes = [image.size for image in images]
        counts = self._fitter.counts(sizes)
        if sample.boxes:
            turns = with_boxes(turns, sample.boxes, sizes, self._chat.form.box_area)
        pieces = self._fitter.pieces(turns, images, counts)
        if not self._fitter.is_independent:
            repairs += [Repair.TURNS_SPLIT] * (len(pieces) - 1)
        repairs += [Repair.TURNS_DROPPED] * (len(turns) - sum(len(piece.turns) for _, piece in pieces))
        for _, piece in pieces:
            if piece.encoded.lost:
                self._require_tokens(piece.turns, piece.encoded.lost)
                repairs.append(Repair.CHARACTERS_LOST)
        first, *rest = [
            Accepted(
                f"{sample.id}{PART_MARK}{start + 1}" if number else sample.id,
                sample.where,
                entry.split,
                piece.turns,
                piece.images,
                piece.counts,
                piece.encoded,
                () if number else tuple(repairs),
                self._prefix(piece),
            )
            for number, (start, piece) in enumerate(pieces)
        ]
        return replace(first, rest=tuple(rest)) if rest else first

    def _prefix(self, piece: Fitted) -> Prefix | None:
        if not self._stores_prefixes:
            return None
        images = [(content_of(image.sha256, image.clip), *image.size) for image in piece.images]
        if self._in_pairs:
            return prefix_of_pair(*piece.encoded.conversations(), self._chat.vision_token_ids, images)
        return prefix_of(piece.encoded, self._chat.vision_token_ids, images)

    def _checked(self, reference: ImageRef) -> CheckedImage:
        if reference.clip:
            return check_clip(reference.read(), reference.clip, self._data)
        return check_image(reference.read(), self._data, name=reference.name)

    def _checked_pair(self, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
        """The turns with a rejected answer in the last one where the run trains on pairs, and else without any."""
        if not self._in_pairs:
            return tuple(replace(turn, rejected="") if turn.rejected else turn for turn in turns)
        if any(mark in turn.rejected for turn in turns for mark in MARKS):
            raise RejectedError(RejectCode.CONV_OBJECTS, "a mark of objects in a rejected answer, which is not filled")
        if turns and turns[-1].calls:
            raise RejectedError(RejectCode.PAIR_INCOMPLETE, "the last answer calls a tool, and pairs are of texts")
        if turns and turns[-1].is_context:
            raise RejectedError(RejectCode.PAIR_INCOMPLETE, "the last answer, which the pair is about, is not learned")
        if turns and turns[-1].rejected in ("", turns[-1].answer):
            problem = "no rejected answer" if not turns[-1].rejected else "a rejected answer that equals the chosen one"
            raise RejectedError(RejectCode.PAIR_INCOMPLETE, f"{problem} in the last turn")
        if any(IMAGE_TOKEN in text for turn in turns[-1:] for text in (turn.answer, turn.rejected)):
            raise RejectedError(RejectCode.CONV_IMAGE_COUNT, f"{IMAGE_TOKEN} in an answer of a pair")
        return turns

    def _require_tokens(self, turns: Sequence[Turn], lost: str) -> None:
        """Raise RejectedError where all of a text is lost."""
        texts = (text.replace(IMAGE_TOKEN, "") for turn in turns for text in turn.texts())
        if not all(map(self._chat.has_tokens, texts)):
            characters = "".join(dict.fromkeys(lost))[:SHOWN_CHARACTERS]
            raise RejectedError(RejectCode.TEXT_NO_TOKENS, f"a text of which no character has a token: {characters}")

    def _require_few(self, count: int, images: str) -> None:
        most = self._data.max_images_per_sequence
        if count > most:
            message = f"{images}, more than data.max_images_per_sequence {most}"
            raise RejectedError(RejectCode.CONV_TOO_MANY_IMAGES, message)
