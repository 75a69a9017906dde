"""Questions that share the beginning of their prompts in an evaluation, as its plan counts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.evaluation.shared_prompts.groups import WORTH
from vlmpipe.trainer.hooks.rules import obstacles_to

if TYPE_CHECKING:
    from vlmpipe.trainer.config.model import ModelConfig
    from vlmpipe.trainer.data.shards.index import SplitIndex


@dataclass(frozen=True)
class MeanPrompt:
    """Mean of what a question adds to those before it. pairs: twice the pairs of tokens that see each other."""

    tokens: float
    images: float
    pairs: float


def questions_per_image(split: SplitIndex, model: ModelConfig) -> float:
    """Questions of a validation split about the same images, on average; 1 where prompts are not shared.

    Images are told apart by the first and the last of a sample, and their number.
    """
    import numpy as np

    if obstacles_to("shared_prompts", model) or split.has_videos or not len(split.images()):
        return 1.0
    counts, names = split.image_count, split.images()
    has_images = counts > 0
    ends = np.cumsum(counts, dtype=np.int64)[has_images]
    _, of_name = np.unique(names, return_inverse=True)
    of_name = of_name.reshape(-1)
    sets = np.stack([of_name[ends - counts[has_images]], of_name[ends - 1], counts[has_images]])
    groups = np.unique(sets, axis=1).shape[1] + int((~has_images).sum())
    return len(split) / groups


def mean_prompt(load: Workload, image_tokens: int, asked_share: float, at_once: int) -> MeanPrompt:
    """A question whose prompt begins with its images, where several about them are answered together.

    image_tokens: of an image. asked_share: of the validation questions, evenly spaced. at_once: questions of a batch.
    """
    tokens, images = load.sample_tokens, load.sample_images
    whole = MeanPrompt(tokens, images, tokens**2)
    together = min(load.asked_together * asked_share, at_once)
    prefix = min(images * (load.image_tokens or image_tokens), tokens)
    again = 1 - 1 / max(together, 1.0)
    if again * prefix < WORTH * tokens:
        return whole
    return MeanPrompt(tokens - again * prefix, images * (1 - again), tokens**2 - again * prefix**2)
