"""Loads the packed sequences of one rank from shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.data.chat.encode import IGNORED, Chat, Encoded
from vlmpipe.trainer.data.packing import Int64Array
from vlmpipe.trainer.data.prefetch import ShardPrefetcher
from vlmpipe.trainer.data.prefixes.spans import Span, prefix_spans
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import SplitIndex
from vlmpipe.trainer.data.shards.sample_ranges import SampleRanges, ShardSamples
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.models.layers.selection_inputs import Selectable, marks_of
from vlmpipe.trainer.sizing.image_grids import AXES, patches_in_time

Float32Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """Samples one after the other, followed by padding, which is a document of its own."""

    input_ids: Int64Array  # (sequence_length,)
    labels: Int64Array  # (sequence_length,), -100 where a token does not count in the loss
    position_ids: Int64Array  # (sequence_length,) or (axes, sequence_length); restarts at each sample and the padding
    image_sha256: tuple[str, ...]  # in order of appearance
    image_sizes: tuple[tuple[int, int], ...]  # (width, height) of each, in pixels; of videos a VideoSize
    image_token_counts: tuple[int, ...]  # of each image
    shown: int  # images, and patches in time of videos
    sample_images: tuple[int, ...]  # images that each sample adds, or conversation of a pair
    images: tuple[bytes, ...]  # encoded images in the same order; empty when the loader does not read images
    sample_ids: tuple[str, ...]
    # That each sample, or conversation of a pair, adds: those of a prefix count for the first one that has it.
    sample_tokens: tuple[int, ...]
    label_tokens: int
    # Of pairs, chosen and rejected conversation in turn: (conversations,) log probabilities under the reference, NaN
    # where they are not known.
    references: Float32Array | None = None
    selectable: Selectable | None = None  # where the model selects tokens of images
    # First token of each prefix that samples share, its end, and the end of the last of these samples.
    prefixes: tuple[Span, ...] = ()

    @property
    def segment_tokens(self) -> list[int]:
        """Tokens of each prefix, branch, and sample that shares nothing, in order."""
        ends = np.cumsum(self.sample_tokens, dtype=np.int64).tolist()
        ends = sorted([*ends, *(end for _, end, _ in self.prefixes)])
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def tokens(self) -> int:
        """The number of tokens, without padding."""
        return sum(self.sample_tokens)


class PackedLoader:
    """Packed sequences of any step and rank: a pure function of the sampler, so there is no state to save."""

    def __init__(
        self,
        split: SplitIndex,
        sampler: PackedBatchSampler,
        chat: Chat,
        reader: ShardReader,
        *,
        images: bool = False,
        ahead: Sequence[ShardPrefetcher] = (),
        ranges: SampleRanges | None = None,
    ) -> None:
        """`images`: also read the encoded images. `ahead`: prefetchers of remote shards. `ranges`: reads the samples
        in the place of `reader`.
        """
        self.sampler, self._split, self._chat = sampler, split, chat
        self._samples = ranges or ShardSamples(split, reader)
        self._images, self._ahead, self._form = images, ahead, chat.form
        self._marks = [*marks_of(chat.tokenizer), chat.image_token_id] if chat.form.selects else []
        # (samples, 2) log probabilities of chosen and rejected answers under the reference
        self.references: Float32Array | None = None

    def sequences_for_step(self, step: int, rank: int, world_size: int) -> list[PackedSequence]:
        """Return the sequences of `read_step`, all in memory."""
        return list(self.read_step(step, rank, world_size))

    def read_step(self, step: int, rank: int, world_size: int) -> Iterator[PackedSequence]:
        """This rank's sequences of an optimizer step: numbers rank, rank + world_size, ... of the global batch.

        Every rank gets equally many; where the batch has no more, an empty one. Each is read when it is taken. Raises
        DataError for a damaged shard.
        """
        for ahead in self._ahead:
            ahead.advance(step)
        batch = self.sampler.batch(step)
        plan = self.sampler.plan(batch.epoch)
        sequences = batch.sequences_of(rank, world_size)
        samples = [[] if sequence is None else plan.members_of(sequence).tolist() for sequence in sequences]
        self._samples.expect(
            [number for members in samples for number in members],
            brings_images=[brings for members in samples for brings in self._bring_images(members)],
        )
        for sequence, members in zip(sequences, samples, strict=True):
            yield self._pack(members, draw_seed(self.sampler.seed, batch.epoch, sequence))

    def close(self) -> None:
        """Stop the prefetchers."""
        for ahead in self._ahead:
            ahead.close()

    def pack_sequence(self, samples: list[int], seed: int = 0) -> PackedSequence:
        """The sequence that holds these samples, by their numbers in the split; for none, an empty sequence.

        seed: of selections of image tokens that training draws.
        """
        self._samples.expect(samples, brings_images=self._bring_images(samples))
        return self._pack(samples, seed)

    def _pack(self, samples: list[int], seed: int) -> PackedSequence:
        """The sequence of samples that `self._samples` expects next."""
        length = self.sampler.data.sequence_length
        input_ids = np.full(length, self._chat.tokenizer.pad_token_id, np.int64)
        labels = np.full(length, IGNORED, np.int64)
        position_ids = np.empty((AXES, length) if self._form.grids else length, np.int64)
        sha256, sizes, counts, sample_images, images = [], [], [], [], []
        lengths: list[int] = []
        slots: list[int] = []
        is_question = np.zeros(length, np.bool_)
        shared_tokens = self._shared_tokens(samples)
        left_out = iter(shared_tokens)
        start = label_tokens = 0
        for number, encoded in self._conversations(samples):
            shared = next(left_out)  # tokens that stand in the sequence already, with their images
            token_counts = [] if shared else self._split.image_token_counts(number)
            fits = self._room_for(encoded, token_counts)
            fits[:shared] = False
            stop = start + int(fits.sum())
            input_ids[start:stop] = np.array(encoded.input_ids)[fits]
            labels[start:stop] = np.array(encoded.labels)[fits]
            position_ids[..., start:stop] = self._positions(number, encoded)[..., fits]
            if self._form.selects:
                position_ids[0, start:stop] = np.arange(stop - start)
                is_question[start:stop] = self._is_question(input_ids[start:stop], labels[start:stop])
                slots += [min(count, self._form.max_kept or count) for count in token_counts]
            lengths.append(stop - start)
            start = stop
            label_tokens += encoded.label_tokens
            counts += token_counts
            sample_images.append(len(token_counts))
            if not shared:
                sha256 += self._split.image_sha256(number)
                sizes += self._split.image_sizes(number)
                images += self._samples.images(number) if self._images else []
        position_ids[..., start:] = np.arange(length - start)
        return PackedSequence(
            input_ids=input_ids,
            labels=labels,
            position_ids=position_ids,
            image_sha256=tuple(sha256),
            image_sizes=tuple(sizes),
            image_token_counts=tuple(counts),
            shown=sum(map(patches_in_time, sizes)),
            sample_images=tuple(sample_images),
            images=tuple(images),
            sample_ids=tuple(self._split.ids[number] for number in samples),
            sample_tokens=tuple(lengths),
            label_tokens=label_tokens,
            references=self._references_of(samples) if self.sampler.in_pairs else None,
            selectable=Selectable(is_question, self._grids(sizes), tuple(slots), seed) if self._form.selects else None,
            prefixes=tuple(prefix_spans(lengths, shared_tokens)),
        )

    def _shared_tokens(self, samples: Sequence[int]) -> list[int]:
        """Tokens of each conversation that the one before it in the sequence begins with, too."""
        if self.sampler.prefixes is None:
            return [0] * len(samples) * (1 + self.sampler.in_pairs)
        of_samples = self.sampler.prefixes.shared_tokens(samples)
        if not self.sampler.in_pairs:
            return of_samples
        in_pairs = self._split.pair_prefix_tokens[samples].tolist() if samples else []
        return [tokens for of_pair in zip(of_samples, in_pairs, strict=True) for tokens in of_pair]

    def _bring_images(self, samples: Sequence[int]) -> list[bool]:
        """Return which samples of a sequence bring their images: those that share no prefix with one before them."""
        if self.sampler.prefixes is None:
            return [True] * len(samples)
        return [not shared for shared in self.sampler.prefixes.shared_tokens(samples)]

    def _positions(self, number: int, encoded: Encoded) -> Int64Array:
        if self._form.grids is None:
            return np.arange(len(encoded.input_ids))
        is_image = np.isin(encoded.input_ids, self._chat.vision_token_ids)
        tokens_per_s = self._form.videos.tokens_per_s if self._form.videos else 0.0
        return self._form.grids.positions(is_image, self._split.image_sizes(number), tokens_per_s)

    def _room_for(self, encoded: Encoded, token_counts: Sequence[int]) -> NDArray[np.bool_]:
        """(tokens,) false for tokens of images beyond the maximum that is kept."""
        fits = np.ones(len(encoded.input_ids), np.bool_)
        if self._form.max_kept is not None and token_counts:
            nth = np.concatenate([np.arange(count) for count in token_counts])
            fits[np.array(encoded.input_ids) == self._chat.image_token_id] = nth < self._form.max_kept
        return fits

    def _is_question(self, input_ids: Int64Array, labels: Int64Array) -> NDArray[np.bool_]:
        """Text before the first answer: the answer itself would tell which tokens matter."""
        return ~np.isin(input_ids, self._marks) & ~np.logical_or.accumulate(labels != IGNORED)

    def _grids(self, sizes: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Rows and columns of tokens of each image."""
        grids = self._form.grids
        assert grids is not None, "models that select tokens know their grids"
        patches = [grids.of(*size) for size in sizes]
        return tuple((rows // grids.merge, columns // grids.merge) for rows, columns in patches)

    def _references_of(self, samples: list[int]) -> Float32Array:
        known = self.references
        return np.full(2 * len(samples), np.nan, np.float32) if known is None else known[samples].reshape(-1)

    def _conversations(self, samples: list[int]) -> Iterator[tuple[int, Encoded]]:
        """Number of the sample, and tokens: of a pair twice, with the chosen and with the rejected answer."""
        for number in samples:
            for encoded in self._encode(number):
                yield number, encoded

    def _encode(self, number: int) -> Sequence[Encoded]:
        turns = self._samples.turns(number)
        encode = self._chat.encode_pair if self.sampler.in_pairs else self._chat.encode
        made = encode(turns, self._split.image_token_counts(number), self._split.image_sizes(number))
        encoded = (made,) if isinstance(made, Encoded) else made
        expected, tokens = int(self._split.tokens[number]), sum(len(sample.input_ids) for sample in encoded)
        if tokens != expected:
            raise DataError(
                f"sample {self._split.ids[number]} has {tokens} tokens, the index says {expected}",
                expected="the tokenizer that the data was prepared with",
                fix="use the tokenizer saved with the prepared data, or delete its DONE file to prepare it again",
            )
        return encoded


def draw_seed(seed: int, epoch: int, sequence: int | None) -> int:
    """Return the seed of random draws for a packed sequence, the same on any number of processes."""
    return int(
        np.random.SeedSequence([seed & 0xFFFFFFFF, epoch, 0 if sequence is None else sequence + 1]).generate_state(1)[0]
    )
