"""Validates samples: id, images, tokens. The result is an accepted sample or a reject."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.chat.encode import Chat, Encoded
from vlmpipe.trainer.data.conversations.grounding import MARKS, with_boxes
from vlmpipe.trainer.data.conversations.independent import independent_spans
from vlmpipe.trainer.data.prefixes.prefix import Prefix, content_of, prefix_of, prefix_of_pair
from vlmpipe.trainer.data.prefixes.sharing import stores_prefixes
from vlmpipe.trainer.data.prepare.checks import CheckedImage, check_clip, check_image, check_turns
from vlmpipe.trainer.data.prepare.deduplicate import NEW, OTHER, SAME, Met, SeenIds
from vlmpipe.trainer.data.rejects import Reject, RejectCode, RejectedError, Repair
from vlmpipe.trainer.data.sample import PART_MARK, ImageRef, Sample, Split, Turn
from vlmpipe.trainer.models.image_tokens import sample_image_tokens
from vlmpipe.trainer.printable import unsafe_characters

LONGEST_ID_CHARS = 256
SHOWN_CHARACTERS = 20
MAX_TURNS = 2000  # of a conversation that are looked at for one piece of it
SHORT_CHARS = 2048  # of a conversation that is tokenized sooner than it is handed to a thread
PIECE_AHEAD = 3  # times the characters of a piece of a conversation that are tokenized for the next one


@dataclass(frozen=True, slots=True)
class Entry:
    """A sample with its final id and split."""

    sample: Sample
    repairs: tuple[Repair, ...]
    split: Split


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


@dataclass(frozen=True, slots=True)
class _Fitted:
    """The first turns of a conversation that fit into a sequence, with their images."""

    turns: tuple[Turn, ...]
    images: tuple[CheckedImage, ...]
    counts: tuple[int, ...]  # tokens of each image
    encoded: Encoded


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


def with_met_ids(source: Iterable[Sample | Reject]) -> Iterator[tuple[Sample | Reject, Met]]:
    """The records of a source, each with whether its id was met before."""
    seen = SeenIds()
    for sample in source:
        met: Met = NEW
        if isinstance(sample, Sample) and not _unsafe(sample.id):
            met = seen.add(sample.id, sample.content_digest())
        yield sample, met


def final_entry(
    sample: Sample | Reject, met: Met, split: Split, excluded: Collection[str] = frozenset()
) -> Entry | Reject:
    """The sample with its final id, or a reject for one whose final id is excluded (`data.exclude`)."""
    entry = _with_final_id(sample, met, split)
    if excluded and isinstance(entry, Entry) and entry.sample.id in excluded:
        # Without its image: what is left out must not be read.
        return Reject(entry.sample.where, entry.sample.id, RejectCode.SAMPLE_EXCLUDED, "data.exclude names its id")
    return entry


def _with_final_id(sample: Sample | Reject, met: Met, split: Split) -> Entry | Reject:
    """Reject a sample that repeats an id of its own; add a suffix to a used id with other content, because LLaVA's sets
    repeat ids, and to that of a repeated record without one, which `data.duplicates` keeps or drops.
    """
    if isinstance(sample, Reject):
        return sample
    if problem := _unsafe(sample.id):
        return _reject(sample, RejectCode.ID_UNSAFE, problem)
    if met.startswith(SAME) and sample.id_is_hash:
        return Entry(replace(sample, id=f"{sample.id}~{int(met.removeprefix(SAME)) + 1}"), (), split)
    if met.startswith(SAME):
        return _reject(sample, RejectCode.ID_DUPLICATE, "the same id with the same content came before")
    if met == OTHER:
        renamed = replace(sample, id=f"{sample.id}~{sample.content_digest()[:12]}")
        return Entry(renamed, (Repair.ID_SUFFIXED,), split)
    return Entry(sample, (), split)


def _reject(sample: Sample, code: RejectCode, message: str) -> Reject:
    return Reject(sample.where, sample.id, code, message, sample.images[0] if sample.images else None)


def _unsafe(identity: str) -> str:
    """Why an id is rejected, or "". Readers of shards may make paths of ids."""
    if not identity or len(identity) > LONGEST_ID_CHARS:
        return f"an id of {len(identity)} characters, not 1 to {LONGEST_ID_CHARS}"
    if unsafe := unsafe_characters(identity):
        return f"an id with control characters or marks of direction: {unsafe}"
    if identity.startswith("/") or ".." in identity.split("/"):
        return "an id that as a path would leave its folder"
    return ""


def _pictures_in(image: ImageRef) -> int:
    """Return 1 for an image, the temporal patches for a video."""
    return image.clip.patches if image.clip else 1


def _described(images: Sequence[ImageRef]) -> str:
    patches = sum(image.clip.patches for image in images if image.clip)
    stills = sum(image.clip is None for image in images)
    return f"{stills} images" + (f" and {patches} patches in time of videos" if patches else "")


def _marks_in(turns: Sequence[Turn]) -> int:
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


def _with_results(turns: Sequence[Turn], start: int, kept: int) -> int:
    """The most of `kept` turns from number `start` on behind which no result of a call follows; one at least."""
    while kept > 1 and start + kept < len(turns) and turns[start + kept].results:
        kept -= 1
    return kept


class SampleValidator:
    """All checks of one sample. Called in several threads at once."""

    def __init__(self, config: JobConfig, chat: Chat) -> None:
        self._data, self._chat, self._in_pairs = config.data, chat, config.train.in_pairs
        self._stores_prefixes = stores_prefixes(config)
        self._image_tokens = sample_image_tokens(config.model)
        self._control_tokens = chat.forbidden_tokens(config.data.allowed_tokens)

    def __call__(self, entry: Entry | Reject) -> Accepted | Reject:
        if isinstance(entry, Reject):
            return entry
        try:
            return self._accept(entry)
        except RejectedError as error:
            return _reject(entry.sample, error.code, str(error))

    def _accept(self, entry: Entry) -> Accepted:
        sample, repairs = entry.sample, list(entry.repairs)
        turns = self._checked_pair(sample.turns)
        check_turns(turns, len(sample.images), self._control_tokens)
        divides = self._splits or self._is_independent
        if not divides and (dropped := len(turns) - len(turns := self._short_enough(turns))):
            sample = replace(sample, images=sample.images[: _marks_in(turns)])
            repairs += [Repair.TURNS_DROPPED] * dropped
        shown = 1 + self._in_pairs  # times that an image is in a packed sequence
        self._require_few(shown * sum(map(_pictures_in, sample.images)), _described(sample.images))
        images = [self._checked(reference) for reference in sample.images]
        repairs += [repair for image in images for repair in image.repairs]
        sizes = [image.size for image in images]
        counts = self._counts(sizes)
        if sample.boxes:
            turns = with_boxes(turns, sample.boxes, sizes, self._chat.form.box_area)
        if self._is_independent:
            pieces = self._independent(turns, images)
        else:
            pieces = self._divided(turns, images) if self._splits else [(0, self._fit(turns, images, counts))]
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

    def _prefix(self, piece: _Fitted) -> Prefix | None:
        if not self._stores_prefixes:
            return None
        images = [(content_of(image.sha256, image.clip), *image.size) for image in piece.images]
        if self._in_pairs:
            return prefix_of_pair(*piece.encoded.conversations(), self._chat.vision_token_ids, images)
        return prefix_of(piece.encoded, self._chat.vision_token_ids, images)

    @property
    def _splits(self) -> bool:
        return self._data.overlong_policy == "split" and not self._in_pairs

    def _fit(
        self, turns: tuple[Turn, ...], images: Sequence[CheckedImage], counts: Sequence[int] | None = None
    ) -> _Fitted:
        """The first turns that fit, all where they are not to be dropped. Raises RejectedError where none do.

        counts: tokens of each image, where they are known.
        """
        sizes = [image.size for image in images]
        counts = self._counts(sizes) if counts is None else counts
        encoded = self._encoded(turns, counts, sizes)
        most = self._data.sequence_length
        while len(encoded.input_ids) > most:
            fitting = self._fitting(encoded, turns) if self._may_drop(turns) else len(turns)
            if fitting == len(turns):
                message = f"{len(encoded.input_ids)} tokens, more than data.sequence_length {most}"
                raise RejectedError(RejectCode.CONV_TOO_LONG, message)
            turns = turns[:fitting]
            images = images[: _marks_in(turns)]
            sizes = [image.size for image in images]
            counts = self._counts(sizes)
            encoded = self._encoded(turns, counts, sizes)
        if not encoded.label_tokens:
            message = f"no answer that is learned within data.sequence_length {most}"
            raise RejectedError(RejectCode.CONV_TOO_LONG, message)
        return _Fitted(turns, tuple(images), tuple(counts), encoded)

    def _divided(self, turns: tuple[Turn, ...], images: Sequence[CheckedImage]) -> list[tuple[int, _Fitted]]:
        """The conversation in pieces that fit, each with the number of its first turn, from 0.

        A turn that does not fit with the images before it is left out. Raises RejectedError where none fits.
        """
        pieces: list[tuple[int, _Fitted]] = []
        problem: RejectedError | None = None
        marks = [0, *accumulate(_marks_in([turn]) for turn in turns)]
        max_chars, start = 0, 0
        while start < len(turns) and not all(turn.is_context for turn in turns[start:]):
            piece = _continued(turns, start, marks[start], max_chars)
            try:
                piece = self._short_enough(piece)
                fitted = self._fit(piece, images[: _marks_in(piece)])
                if len(fitted.turns) != (whole := _with_results(turns, start, len(fitted.turns))):
                    fitted = self._fit(piece[:whole], images[: _marks_in(piece[:whole])])
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

    @property
    def _is_independent(self) -> bool:
        return self._data.turns == "independent" and not self._in_pairs

    def _independent(self, turns: tuple[Turn, ...], images: Sequence[CheckedImage]) -> list[tuple[int, _Fitted]]:
        """Each turn with the images up to it, and the turn's number, from 0.

        A turn that does not fit is left out, unless the policy is to reject. Raises RejectedError where none fits.
        """
        pieces: list[tuple[int, _Fitted]] = []
        problem: RejectedError | None = None
        marks = [0, *accumulate(_marks_in([turn]) for turn in turns)]
        for start, stop in independent_spans(turns):
            piece = _continued(turns[:stop], start, marks[start], 0)
            try:
                pieces.append((start, self._fit(self._short_enough(piece), images[: marks[stop]])))
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
        # Of a last answer that fits, what the template writes behind it may not.
        return next((number for number in reversed(learned[:fits]) if number < len(turns)), len(turns))

    def _short_enough(self, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
        """The first turns whose texts may fit by their number of characters, before they take time and memory.

        Normal forms of Unicode join at most four characters. Raises RejectedError.
        """
        most = 4 * self._data.sequence_length * self._chat.longest_token_chars
        chars = list(accumulate(sum(map(len, turn.texts())) for turn in turns))
        if chars[-1] <= most:
            return turns
        kept = max(1, bisect_right(chars, most))
        if chars[0] > most or not self._may_drop(turns):
            tokens = self._data.sequence_length
            message = f"{chars[-1]:,} characters, which {tokens} tokens (data.sequence_length) cannot hold"
            raise RejectedError(RejectCode.CONV_TOO_LONG, message)
        return turns[:kept]

    def _checked(self, reference: ImageRef) -> CheckedImage:
        if reference.clip:
            return check_clip(reference.read(), reference.clip, self._data)
        return check_image(reference.read(), self._data, name=reference.name)

    def _counts(self, sizes: Sequence[tuple[int, int]]) -> list[int]:
        try:
            return self._image_tokens(sizes)
        except ValueError as error:
            raise RejectedError(RejectCode.IMAGE_ASPECT, str(error)) from error

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
            found = "no rejected answer" if not turns[-1].rejected else "a rejected answer that equals the chosen one"
            raise RejectedError(RejectCode.PAIR_INCOMPLETE, f"{found} in the last turn")
        if any(IMAGE_TOKEN in text for turn in turns[-1:] for text in (turn.answer, turn.rejected)):
            raise RejectedError(RejectCode.CONV_IMAGE_COUNT, f"{IMAGE_TOKEN} in an answer of a pair")
        return turns

    def _encoded(self, turns: tuple[Turn, ...], counts: Sequence[int], sizes: Sequence[tuple[int, int]]) -> Encoded:
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
