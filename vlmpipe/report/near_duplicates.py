"""Pairs of similar images, a validation image and a training image."""

from __future__ import annotations

from collections.abc import Iterator

from vlmpipe.report.load import RunFiles, mapping, number, sequence
from vlmpipe.report.samples import EmbeddedImage, PreparedImages, thumbnail
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage import open_storage


def recorded_pairs(files: RunFiles) -> list[tuple[str, dict[str, object]]]:
    """The set that each pair is of, "" for the validation split, and the pair as it is recorded."""
    pairs = [("", mapping(pair)) for pair in sequence(mapping(files.stats.get("near_duplicates")).get("pairs"))]
    for name, benchmark in files.evaluation.benchmarks.items():
        pairs += [(name, pair.model_dump(mode="json")) for pair in benchmark.pairs_like_train]
    return pairs


def near_duplicate_view(files: RunFiles, images: PreparedImages | None) -> list[dict[str, object]]:
    """For the template: the two images of each pair, their splits, and how near."""
    return list(_pairs(files, images)) if images else []


def _pairs(files: RunFiles, images: PreparedImages) -> Iterator[dict[str, object]]:
    for benchmark, pair in recorded_pairs(files):
        train, scored = sequence(pair.get("train")), sequence(pair.get("eval"))
        if len(train) != 2 or not (benchmark or len(scored) == 2):
            continue
        yield {
            "scored": _benchmark_image(files, pair) if benchmark else images.embedded_image("eval", *scored),
            "scored_name": pair.get("image") if benchmark else scored[0],
            "of": benchmark or "validation split",
            "trained": images.embedded_image("train", *train),
            "trained_name": train[0],
            "distance": number(pair.get("distance")),
        }


def _benchmark_image(files: RunFiles, pair: dict[str, object]) -> EmbeddedImage:
    try:
        return thumbnail(open_storage(files.run_uri).read(str(pair.get("picture"))))
    except UserError as error:
        return EmbeddedImage(problem=f"The image cannot be read: {error.found}.")
