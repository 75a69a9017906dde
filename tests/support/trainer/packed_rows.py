"""Packed sequences made by hand, and images that are none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vlmpipe.trainer.data.chat.encode import IGNORED
from vlmpipe.trainer.data.loader import PackedSequence
from vlmpipe.trainer.models.image_inputs import Images

ROW_TOKENS = 8


def row(labels: list[int], images: int = 0) -> PackedSequence:
    ids = np.arange(ROW_TOKENS, dtype=np.int64)
    return PackedSequence(
        input_ids=ids,
        labels=np.array(labels, dtype=np.int64),
        position_ids=ids,
        image_sha256=tuple(f"image{number}" for number in range(images)),
        image_sizes=((8, 8),) * images,
        image_token_counts=(1,) * images,
        shown=images,
        sample_images=(images,),
        images=(),
        sample_ids=("sample",),
        sample_tokens=(ROW_TOKENS,),
        label_tokens=sum(label != IGNORED for label in labels),
    )


def no_images(rows: Sequence[PackedSequence]) -> Images:
    return Images(torch.empty(sum(len(each.image_sha256) for each in rows), 1, 4))
