"""The prefix of a sample, decided by the sample alone.

It is all tokens up to the last image token, so images of a prefix are whole, and it ends before the first label by at
least one token, so no token of a prefix predicts a label. Samples with equal keys have equal tokens and equal images in
it, in the same order, and therefore equal hidden states, whatever the template and the tokenizer do.

The conversations of a pair share more: all tokens before their answers but the last one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from vlmpipe.trainer.data.chat.encode import IGNORED, Encoded
from vlmpipe.trainer.data.prefixes.groups import KEY_BYTES
from vlmpipe.trainer.data.sample import Clip

NO_KEY = "00" * KEY_BYTES


@dataclass(frozen=True, slots=True)
class Prefix:
    """tokens: 0 where a sample shares nothing. key: hexadecimal, equal for equal prefixes. pair_tokens: that both
    conversations of a pair begin with, these included; 0 where they share none."""

    tokens: int = 0
    key: str = NO_KEY
    pair_tokens: int = 0


def content_of(sha256: str, clip: Clip | None) -> str:
    """A name that only equal images have, and of videos those of equal length alone, which decides positions."""
    return f"{sha256} {clip.patches} of {clip.patch_s!r} s" if clip else sha256


def prefix_of(encoded: Encoded, vision_token_ids: Collection[int], images: Sequence[tuple[str, int, int]]) -> Prefix:
    """The prefix of a sample; an empty one for a sample without images, or with images in or after an answer.

    images: `content_of`, width and height of each. Two images of one size have the same tokens, so the hash decides.
    """
    ids = np.array(encoded.input_ids, np.int64)
    places = np.flatnonzero(np.isin(ids, list(vision_token_ids)))
    labels = np.flatnonzero(np.array(encoded.labels) != IGNORED)
    if not len(images) or not len(places) or not len(labels) or places[-1] + 1 >= labels[0]:
        return Prefix()
    tokens = int(places[-1]) + 1
    digest = hashlib.sha256(ids[:tokens].astype("<i8").tobytes())
    for sha256, width, height in images:
        digest.update(f" {sha256} {width}x{height}".encode())
    return Prefix(tokens, digest.hexdigest()[: 2 * KEY_BYTES])


def prefix_of_pair(
    chosen: Encoded, rejected: Encoded, vision_token_ids: Collection[int], images: Sequence[tuple[str, int, int]]
) -> Prefix:
    """The prefix of a pair, which it may share with other pairs, and of its conversations; an empty one where images
    are not before both answers by a token at least.

    images: see `prefix_of`.
    """
    ids = [np.array(encoded.input_ids, np.int64) for encoded in (chosen, rejected)]
    first_labels = [np.flatnonzero(np.array(encoded.labels) != IGNORED)[:1] for encoded in (chosen, rejected)]
    shortest = min(map(len, ids))
    differ = np.flatnonzero(ids[0][:shortest] != ids[1][:shortest])[:1]
    before_labels = (int(first[0]) - 1 for first in first_labels if len(first))
    tokens = max(0, min(shortest - 1, *before_labels, *map(int, differ)))
    if any(np.isin(of_one[tokens:], list(vision_token_ids)).any() for of_one in ids):
        return Prefix()
    prefix = prefix_of(chosen, vision_token_ids, images)
    return Prefix(prefix.tokens, prefix.key, tokens)
