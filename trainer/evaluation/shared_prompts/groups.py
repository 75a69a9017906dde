"""Prompts of a batch with a common beginning that has all their images."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

WORTH = 0.25  # share of the prompts' tokens that must be computed fewer times


@dataclass(frozen=True)
class PromptGroup:
    """Consecutive prompts about the same images. tokens: how many they all begin with, all image tokens among them."""

    members: range
    tokens: int


def prompt_groups(
    prompts: Sequence[list[int]], images: Sequence[Hashable], image_token_ids: Sequence[int]
) -> list[PromptGroup]:
    """The groups of a batch, of one prompt each where too little would be shared.

    images: what tells the images of each prompt apart; prompts about the same ones follow each other.
    """
    groups: list[PromptGroup] = []
    for _, run in itertools.groupby(range(len(prompts)), key=images.__getitem__):
        places = list(run)
        members = range(places[0], places[-1] + 1)
        similar = [prompts[place] for place in places]
        common = min(_common(min(similar), max(similar)), min(map(len, similar)) - 1)  # what these share, all do
        needed = max(_behind_images(prompt, image_token_ids) for prompt in similar)
        if common >= max(needed, 1):
            groups.append(PromptGroup(members, common))
        else:
            groups += [PromptGroup(range(place, place + 1), len(prompts[place]) - 1) for place in members]
    saved = sum((len(group.members) - 1) * group.tokens for group in groups)
    if saved < WORTH * sum(map(len, prompts)):
        return [PromptGroup(range(place, place + 1), len(prompt) - 1) for place, prompt in enumerate(prompts)]
    return groups


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens that both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def _behind_images(prompt: Sequence[int], image_token_ids: Sequence[int]) -> int:
    """Tokens up to the last image token."""
    return max((place + 1 for place, token in enumerate(prompt) if token in image_token_ids), default=0)
