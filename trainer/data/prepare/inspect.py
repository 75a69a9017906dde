"""Tokens and labels of a source's first samples, for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby, islice

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.encode import IGNORED, Chat, Encoded
from vlmpipe.trainer.data.chat.run_chat import make_chat
from vlmpipe.trainer.data.exclusions.exclusion_file import read_exclusions
from vlmpipe.trainer.data.prepare.fingerprint import find_prepared
from vlmpipe.trainer.data.prepare.validation.deduplicate import NEW
from vlmpipe.trainer.data.prepare.validation.final_ids import final_entry
from vlmpipe.trainer.data.prepare.validation.validate_sample import Accepted, SampleValidator
from vlmpipe.trainer.data.rejects import Reject
from vlmpipe.trainer.data.replay.place import with_located_data
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.data.tokenize import TRAINED_PREFIX
from vlmpipe.trainer.models.image_tokens import image_form_of


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens that are all labels, all of an image, or neither."""

    text: str
    tokens: int
    is_label: bool
    is_image: bool


@dataclass(frozen=True)
class InspectedSample:
    """A sample as training reads it. `rejected`: why preparation leaves it out; it then has no tokens."""

    id: str
    where: str
    rejected: str
    encoded: Encoded
    pieces: tuple[Piece, ...]
    images: tuple[bytes, ...] = ()  # as preparation stores them


def inspect(config: JobConfig, *, first: int, count: int) -> tuple[Chat, Iterator[InspectedSample]]:
    """The run's chat, and samples number `first` to `first + count - 1` of each of its sources, from 0.

    Raises UserError (66) where the tokenizer is trained on the data and the data is not prepared yet.
    """
    config = with_located_data(config)
    chat = _chat(config)
    validator = SampleValidator(config, chat)
    members = open_source(config.data).members()
    records = chain.from_iterable(islice(member, first, first + count) for member in members)
    excluded = read_exclusions(config.data.exclude).ids
    results = (validator(final_entry(record, NEW, "train", excluded)) for record in records)
    return chat, (
        _inspected(chat, sample)
        for result in results
        for sample in ([result] if isinstance(result, Reject) else result.samples)
    )


def _chat(config: JobConfig) -> Chat:
    if not config.model.tokenizer.startswith(TRAINED_PREFIX):
        return make_chat(config.model, config.data, ())
    return Chat.load(open_prepared(find_prepared(config)), image_form_of(config.model))


def _inspected(chat: Chat, result: Accepted | Reject) -> InspectedSample:
    if isinstance(result, Reject):
        return InspectedSample(result.id, result.where, f"{result.code}: {result.message}", Encoded([], []), ())
    encoded = result.encoded
    images = tuple(image.data for image in result.images)
    return InspectedSample(result.id, result.where, "", encoded, tuple(pieces_of(chat, encoded)), images)


def pieces_of(chat: Chat, encoded: Encoded) -> Iterator[Piece]:
    """The tokens in runs of one kind. Text that is cut within a character has a replacement character."""

    def kind(token: tuple[int, int]) -> tuple[bool, bool]:
        return token[1] != IGNORED, token[0] in chat.vision_token_ids

    pairs: Iterable[tuple[int, int]] = zip(encoded.input_ids, encoded.labels, strict=True)
    for (is_label, is_image), run in groupby(pairs, kind):
        ids = [token for token, _ in run]
        written = ids[:1] if is_image else ids
        is_still = is_image and ids[0] == chat.image_token_id
        text = chat.placeholder if is_still else chat.tokenizer.decode(written, clean_up_tokenization_spaces=False)
        yield Piece(text, len(ids), is_label, is_image)
