"""Scored images that look like training images: scores on them mean less.

Data that was prepared before images had signatures (format 10 and older) says nothing: the counts are null then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vlmpipe.trainer.config.benchmarks import ANSWERS_FOLDER
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.near_duplicates.table import NAME, like_train
from vlmpipe.trainer.data.prepare.previews import thumbnail
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.evaluation.benchmarks.question import BenchmarkQuestion
from vlmpipe.trainer.nesting import object_at
from vlmpipe.trainer.storage import open_storage


def validation_images_like_train(stats: Mapping[str, object]) -> dict[str, object]:
    """The validation split's part of evaluate.json. stats: of the prepared data."""
    near = object_at(stats, "near_duplicates")
    return {"images_like_train": near.get("eval_images"), "like_train_compared": near.get("compared")}


def images_like_train(
    job: JobConfig, benchmark: str, questions: Sequence[BenchmarkQuestion], signatures: Mapping[str, bytes]
) -> dict[str, object]:
    """A benchmark's part of evaluate.json; writes small images of the closest images into the run's folder.

    signatures: by name of an image.
    """
    prepared = open_prepared(job.pointers().prepared_uri)
    if NAME not in {file.name for file in prepared.list()}:
        return {"images_like_train": None, "like_train_compared": None}
    result = like_train(prepared.fetch(NAME), signatures)
    images, run = {question.image.name: question.image for question in questions}, open_storage(job.run.run_uri)
    pairs = []
    for number, (name, (identity, image, distance)) in enumerate(result.closest()):
        path = f"{ANSWERS_FOLDER}/{benchmark}-like-train-{number}.png"
        run.write(path, thumbnail(images[name].read(), job.data.max_image_pixels))
        pairs.append({"image": name, "picture": path, "train": (identity, image), "distance": distance})
    return {
        "images_like_train": len(result.nearest),
        "images_without_signature": result.without_signature,
        "like_train_compared": result.compared,
        "pairs_like_train": pairs,
    }
