"""Images of other samples in place of a question's own: the control that shows whether a model looks.

The text must not tell the difference: another image has the tokens of the question's own, and its tiles in each
direction. Where no other sample's has, other samples' images are resized to the size of the question's own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from PIL import Image

from vlmpipe.trainer.data.sample import png_bytes
from vlmpipe.trainer.data.shards.index import SplitIndex
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.evaluation.answer import ShownImages
from vlmpipe.trainer.models.image_tokens import ImageForm
from vlmpipe.trainer.models.pixels import decoded
from vlmpipe.trainer.sizing.image_grids import VideoSize


class ShuffledImages:
    """The other images of each sample of a split.

    From distant samples, because samples with neighbouring ids are often related, such as one scan at two places.
    """

    def __init__(self, split: SplitIndex, shards: ShardReader | None, form: ImageForm) -> None:
        self._split, self._shards, self._form = split, shards, form
        self._similar: dict[object, list[int]] = defaultdict(list)
        for sample in range(len(split)):
            self._similar[self._kind(sample)].append(sample)

    def partner(self, sample: int) -> int | None:
        """A sample whose images have the same tokens and tiles, and none of which is this sample's; None without."""
        images, similar = set(self._split.image_sha256(sample)), self._similar[self._kind(sample)]
        start = bisect_left(similar, (sample + len(self._split) // 2) % len(self._split))
        for other in [*similar[start:], *similar[:start]]:
            if other != sample and images.isdisjoint(self._split.image_sha256(other)):
                return other
        return None

    def instead_of(self, sample: int, shown: ShownImages) -> ShownImages | None:
        """Other images for a question about `shown`, the first images of `sample`.

        None where nothing else can be shown: the question has no image, no other sample has enough images that differ,
        or they are videos.
        """
        if not shown.counts:
            return None
        assert self._shards is not None
        other = self.partner(sample)
        if other is not None:
            location, most = self._split.sample_location(other), len(shown.counts)
            shards = self._shards
            sha256 = self._split.image_sha256(other)[:most]
            sizes, counts = self._split.image_sizes(other)[:most], self._split.image_token_counts(other)[:most]
            return ShownImages(counts, sizes, sha256, lambda: shards.images(location)[:most], are_cached=True)
        return self._resized(sample, shown)

    def _resized(self, sample: int, shown: ShownImages) -> ShownImages | None:
        count, shards = len(self._split), self._shards
        assert shards is not None
        if any(isinstance(size, VideoSize) for size in shown.sizes):
            return None
        known, candidates = set(self._split.image_sha256(sample)), list[tuple[int, int, str]]()
        for step in range(count):
            other = (sample + count // 2 + step) % count
            sizes = self._split.image_sizes(other)
            for place, sha256 in enumerate(self._split.image_sha256(other)):
                if sha256 not in known and not isinstance(sizes[place], VideoSize):
                    known.add(sha256)
                    candidates.append((other, place, sha256))
            if len(candidates) >= len(shown.sizes):
                break
        if len(candidates) < len(shown.sizes):
            return None
        chosen = candidates[: len(shown.sizes)]
        names = [
            f"{sha256} {width}x{height}" for (_, _, sha256), (width, height) in zip(chosen, shown.sizes, strict=True)
        ]

        def read() -> Sequence[bytes]:
            images = [shards.images(self._split.sample_location(other))[place] for other, place, _ in chosen]
            return [
                png_bytes(decoded(image).resize(size, Image.Resampling.BICUBIC))
                for image, size in zip(images, shown.sizes, strict=True)
            ]

        return ShownImages(shown.counts, shown.sizes, names, read, are_cached=False)

    def _kind(self, sample: int) -> object:
        counts = tuple(self._split.image_token_counts(sample))
        return counts, tuple(self._form.marks(self._split.image_sizes(sample)))
