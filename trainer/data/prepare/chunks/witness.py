"""Digests of records from the bytes that were read, so that a chunk is stored only under its true digest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vlmpipe.trainer.data.prepare.validation.final_ids import Entry
from vlmpipe.trainer.data.prepare.validation.validate_sample import Accepted, SampleValidator
from vlmpipe.trainer.data.rejects import Reject, RejectedError
from vlmpipe.trainer.data.sample import ImageRef, content_of, stable_digest
from vlmpipe.trainer.errors import DataError

Content = Callable[[ImageRef], str]  # identity of an image's bytes


def digest_of(entry: Entry | Reject, content: Content) -> bytes:
    """Covers all that decides the prepared sample except its split, and not its place in the source."""
    if isinstance(entry, Reject):
        shown = entry.image and content(entry.image)
        return bytes.fromhex(stable_digest("reject", entry.id, entry.code, entry.message, shown))
    sample = entry.sample
    # Only the suffix of a name: the rest may contain the image's place in the source.
    suffixes = [image.name.rpartition(".")[2].lower() for image in sample.images]
    images = list(zip(suffixes, map(content, sample.images), strict=True))
    turns = [(*turn.identity(), turn.slice, *turn.fields) for turn in sample.turns]
    return bytes.fromhex(stable_digest(sample.id, entry.repairs, turns, images, *sample.boxes))


def content_now(image: ImageRef) -> str:
    """Identity of the image's bytes as they are now, or why they cannot be read."""
    try:
        return image.content()
    except RejectedError as error:  # counted when the chunk is prepared
        return f"{error.code} {error}"


class Witness:
    """Validates entries, and makes their digests from the images' bytes that the validator was given."""

    def __init__(self, validator: SampleValidator) -> None:
        self._validator = validator

    def __call__(self, entry: Entry | Reject) -> tuple[Accepted | Reject, bytes]:
        """The result, and `digest_of` with the entry's split after it."""
        if isinstance(entry, Reject):
            return self._validator(entry), digest_of(entry, content_now) + b"train"
        if not entry.sample.images:
            return self._validator(entry), digest_of(entry, content_now) + entry.split.encode()
        seen: dict[int, str] = {}
        images = tuple(_watched(image, number, seen) for number, image in enumerate(entry.sample.images))
        result = self._validator(replace(entry, sample=replace(entry.sample, images=images)))
        numbers = {id(image): number for number, image in enumerate(entry.sample.images)}

        def content(image: ImageRef) -> str:
            return seen.get(numbers[id(image)]) or content_now(image)

        return result, digest_of(entry, content) + entry.split.encode()


def _watched(image: ImageRef, number: int, seen: dict[int, str]) -> ImageRef:
    """The image, whose reading notes the identity of its bytes."""
    from_bytes = image.is_file or image.known is None

    def read() -> bytes:
        data = image.read()
        # A part's file stays open in this thread, so that its identity is that of the bytes which were decoded.
        seen[number] = content_of(data) if from_bytes else content_now(image)
        return data

    return replace(image, read=read)


class SourceChangedError(DataError):
    """The bytes of a source are not those that were planned. `EXPECTED` names it in the report of a worker process."""

    EXPECTED = "files that stay as they are until the data is prepared"

    def __init__(self, source: str) -> None:
        super().__init__(
            f"{source} changed while it was prepared: records or images are not those that were read before",
            expected=self.EXPECTED,
            fix="run again, which reads everything from the start; what was stored before is not affected",
        )
